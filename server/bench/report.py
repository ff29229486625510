"""What a load test found, as figures, as a table, and as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from radixserve.engine.errors import ConfigError
from radixserve.server.bench.load import ClientRun, Sample

Summary = dict[str, float]

_SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
# A client process that is busy for a larger share of the time may be what limits the load.
_BUSY_CLIENT = 0.8
_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Goal:
    """A request is good when its first token and, on average, each further one come within so many seconds."""

    ttft_s: float = 0.5
    itl_s: float = 0.05

    def is_met(self, sample: Sample) -> bool:
        return sample.error is None and sample.ttft_s <= self.ttft_s and sample.itl_s <= self.itl_s


def summarize(runs: Sequence[ClientRun], goal: Goal) -> Summary:
    """Figures of all client processes of one load test; times in ms, ``gap``: between chunks with text."""
    samples = [sample for run in runs for sample in run.samples]
    good = [sample for sample in samples if sample.error is None]
    wall_s = max(run.ended for run in runs) - min(run.began for run in runs)
    chunks = sum(len(sample.gaps_s) + 1 for sample in good)
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "wall_s": wall_s,
        "output_tokens_per_s": sum(sample.completion_tokens for sample in good) / wall_s,
        "prompt_tokens_per_s": sum(sample.prompt_tokens for sample in good) / wall_s,
        "cached_tokens": sum(sample.cached_tokens for sample in good),
        "requests_per_s": len(good) / wall_s,
        "goodput_per_s": sum(map(goal.is_met, samples)) / wall_s,
        "goodput_share": sum(map(goal.is_met, samples)) / max(1, len(samples)),
        **_percentiles("ttft", (sample.ttft_s for sample in good)),
        **_percentiles("gap", (gap for sample in good for gap in sample.gaps_s)),
        **_percentiles("itl", (sample.itl_s for sample in good if sample.completion_tokens > 1)),
        **_percentiles("total", (sample.total_s for sample in good)),
        "chunks_per_s": chunks / wall_s,
        "client_us_per_chunk": 1e6 * sum(run.cpu_s for run in runs) / max(1, chunks),
        "client_busy_share": max(run.cpu_s / (run.ended - run.began) for run in runs),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of an ascending list lies (nearest rank); 0 for an empty list."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(columns: Mapping[str, Summary]) -> str:
    """Figures as lines, one column for each load test; and a warning where the client was too busy to measure."""
    lines = [f"{'':<22}" + "".join(f"{name:>14}" for name in columns)]
    for figure in next(iter(columns.values())):
        lines.append(f"{figure:<22}" + "".join(f"{_shown(summary[figure]):>14}" for summary in columns.values()))
    busy = [name for name, summary in columns.items() if summary.get("client_busy_share", 0.0) > _BUSY_CLIENT]
    if busy:
        lines.append(f"{', '.join(busy)}: a client process was busy nearly all the time; raise --processes")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _percentiles(name: str, seconds: Iterable[float]) -> Summary:
    ordered = sorted(seconds)
    return {f"{name}_{label}_ms": 1e3 * percentile(ordered, share) for label, share in _SHARES.items()}


# ---- pictures, with matplotlib (the extra ``plot``) ----


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
