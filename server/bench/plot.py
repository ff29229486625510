"""Pictures of load tests, with matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from radixserve.engine.errors import ConfigError
from radixserve.server.bench.report import Summary

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Raise ``ConfigError`` at once if ``path`` cannot be drawn at the end."""
    if path is None:
        return
    if path.suffix not in _FORMATS:
        raise ConfigError(f"--plot: {path} must end in one of {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'radixserve[plot]'")


def plot_curves(path: Path, x_label: str, points: Mapping[float, Summary]) -> None:
    """Throughput, latencies and goodput over ``points``, by clients or by rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = {
        "tokens/s": {"generated": "output_tokens_per_s"},
        "first token, ms": {"p50": "ttft_p50_ms", "p99": "ttft_p99_ms"},
        "between chunks, ms": {"p50": "gap_p50_ms", "p99": "gap_p99_ms"},
        "good requests, share": {"within both limits": "goodput_share"},
    }
    for axes, (title, curves) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for label, name in curves.items():
            axes.plot(list(points), [summary[name] for summary in points.values()], marker="o", label=label)
        axes.set(title=title, xlabel=x_label, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def plot_spread(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """How times are spread: a panel for each title, in it a curve for each label, the share of its ms up to x."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(panels), 4), layout="constrained")
    (row,) = figure.subplots(1, len(panels), squeeze=False)
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        for label, times in curves.items():
            axes.ecdf(times or [0.0], label=label)
        axes.set(title=title, xlabel="ms", ylabel="share within", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
