"""What a load test found, as figures and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from radixserve.server.bench.load import ClientRun, Sample

Summary = dict[str, float]

_SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
# A client process that is busy for a larger share of the time may be what limits the load.
_BUSY_CLIENT = 0.8


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
