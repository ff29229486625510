"""Pictures of load tests, with matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from radixserve.engine.errors import ConfigError
from radixserve.server.bench.load import Sample
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


def plot_spread(path: Path, samples: Sequence[Sample]) -> None:
    """How the times of one load test are spread: the share of requests and chunks that came within x ms."""
    from matplotlib.figure import Figure

    good = [sample for sample in samples if sample.error is None]
    panels = {
        "first token": [1e3 * sample.ttft_s for sample in good],
        "between chunks": [1e3 * gap for sample in good for gap in sample.gaps_s],
        "whole answer": [1e3 * sample.total_s for sample in good],
    }
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (title, times) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.ecdf(times or [0.0])
        axes.set(title=title, xlabel="ms", ylabel="share within", xscale="log")
        axes.grid(alpha=0.3)
    figure.savefig(path)
