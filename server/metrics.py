"""What the requests of this process went through, counted for /metrics, and added up over all workers.

Latencies are counted in plain arrays without locks, as the time between tokens is observed for every token. The
Prometheus side of it is ``routes/metrics.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from radixserve.engine.messages import TokenEvent

log = logging.getLogger("radixserve.server")

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))

# What each histogram tells, and the upper bounds of its buckets, the last one but infinity.
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", _LONG_S),
    "inter_token_latency_seconds": ("Between two tokens of a request", _SHORT_S),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token", _LONG_S),
    "request_queue_time_seconds": ("From a request's arrival in the engine to its admission", _LONG_S),
    "request_prefill_time_seconds": ("From a request's admission to its first token", _LONG_S),
    "request_decode_time_seconds": ("From a request's first token to its last", _LONG_S),
    "request_prompt_tokens": ("Tokens of a request's prompt", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request", _TOKENS),
}
# What each counter tells, and the label that tells its counts apart ("" for one that has none).
COUNTERS: Mapping[str, tuple[str, str]] = {
    "request_success": ("Requests answered to their end", "finished_reason"),
    "admission_rejections": ("Requests that the engine refused", "reason"),
    "num_aborted_requests": ("Requests whose client left, or that /abort_request ended", ""),
    "num_failed_requests": ("Requests that ended with an error", ""),
}


class Histogram(msgspec.Struct):
    """``counts`` by bucket, the last one for what is above all ``bounds``; ``total`` is the sum of the values."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class Numbers(msgspec.Struct):
    """Counters by name and label value, and histograms by name: of one worker or of several."""

    counters: dict[str, dict[str, int]]
    histograms: dict[str, Histogram]

    @classmethod
    def zero(cls) -> Numbers:
        # Those without a label are exported from the start, so that a rate over their first event is right.
        counters: dict[str, dict[str, int]] = {name: {} if label else {"": 0} for name, (_, label) in COUNTERS.items()}
        histograms = {name: Histogram(bounds, [0] * (len(bounds) + 1)) for name, (_, bounds) in HISTOGRAMS.items()}
        return cls(counters, histograms)

    def count(self, name: str, label: str = "") -> None:
        counts = self.counters[name]
        counts[label] = counts.get(label, 0) + 1

    def add(self, other: Numbers) -> None:
        for name, counts in other.counters.items():
            mine = self.counters[name]
            for label, count in counts.items():
                mine[label] = mine.get(label, 0) + count
        for name, histogram in other.histograms.items():
            self.histograms[name].add(histogram)


class RequestObserver(Protocol):
    """Is told what happens to one request."""

    def first_token(self, event: TokenEvent, ttft_s: float) -> None: ...

    def end(self, outcome: str, reason: str, *, prompt_tokens: int, generated_tokens: int) -> None:
        """As ``RequestMeter.end``."""


class RequestMeter:
    """Watches one request of the engine, from its ``Submit`` to its one end, and counts it in ``numbers``; observers
    are told what happens to it."""

    def __init__(self, numbers: Numbers, num_prompt_tokens: int, observers: Sequence[RequestObserver] = ()) -> None:
        self._observers = observers
        self._numbers = numbers
        self._gaps = numbers.histograms["inter_token_latency_seconds"]
        self._num_prompt_tokens = num_prompt_tokens
        self._submitted_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = 0.0
        self._num_tokens = 0
        self._ended = False

    def on_token(self, now: float) -> None:
        """One more token, received at ``now`` (``time.monotonic``)."""
        gaps, gap = self._gaps, now - self._last_at
        gaps.counts[bisect_left(gaps.bounds, gap)] += 1  # observe, without the call
        gaps.total += gap
        self._last_at = now
        self._num_tokens += 1

    def on_tokens(self, event: TokenEvent, now: float) -> None:
        """The same for an event with tokens; only the first tokens come in one for sure."""
        if self._first_at is None:
            self._take_first(event, now)
        else:
            self._gaps.observe(now - self._last_at)
        self._last_at = now
        self._num_tokens += len(event.token_ids)

    def _take_first(self, event: TokenEvent, now: float) -> None:
        self._first_at = now
        histograms = self._numbers.histograms
        histograms["time_to_first_token_seconds"].observe(now - self._submitted_at)
        if event.queue_s is not None and event.prefill_s is not None:
            histograms["request_queue_time_seconds"].observe(event.queue_s)
            histograms["request_prefill_time_seconds"].observe(event.prefill_s)
        for observer in self._observers:
            observer.first_token(event, now - self._submitted_at)

    def end(self, outcome: str, reason: str = "") -> None:
        """``outcome``: the counter that the request is counted in, once. ``reason``: its label there."""
        if self._ended:
            return
        self._ended = True
        self._numbers.count(outcome, reason)
        if outcome == "request_success":
            histograms = self._numbers.histograms
            histograms["e2e_request_latency_seconds"].observe(self._last_at - self._submitted_at)
            histograms["request_prompt_tokens"].observe(self._num_prompt_tokens)
            histograms["request_generation_tokens"].observe(self._num_tokens)
            histograms["request_decode_time_seconds"].observe(self._last_at - (self._first_at or self._last_at))
        for observer in self._observers:
            observer.end(outcome, reason, prompt_tokens=self._num_prompt_tokens, generated_tokens=self._num_tokens)


class WorkerNumbers:
    """The numbers of this worker, and their sum with those of all workers that share ``folder``.

    Whichever worker a scrape meets has to answer for all of them: each writes its numbers to a file of its own every
    second if they changed, and when it is asked. The file of a worker that died stays, so that no sum goes down.
    """

    def __init__(self, folder: Path) -> None:
        self.numbers = Numbers.zero()
        self._folder = folder
        self._path = folder / f"metrics-{uuid.uuid4().hex}"
        self._written = b""

    def publish(self) -> None:
        data = msgspec.msgpack.encode(self.numbers)
        if data == self._written:
            return
        new = self._path.with_name(f"new-{self._path.name}")
        try:
            new.write_bytes(data)
            os.replace(new, self._path)  # a reader sees the old file or the new one
            self._written = data
        except OSError as error:
            log.warning("metrics cannot be shared with the other workers: %s", error)

    def sum_of_all(self) -> Numbers:
        self.publish()
        parts = {self._path: self.numbers, **dict(self._others())}
        total = Numbers.zero()
        # In one order whoever adds up: a sum that another order rounds down would look like a restart to Prometheus.
        for path in sorted(parts):
            total.add(parts[path])
        return total

    def _others(self) -> Iterable[tuple[Path, Numbers]]:
        for path in self._folder.glob("metrics-*"):
            if path != self._path:
                with contextlib.suppress(OSError):
                    yield path, msgspec.msgpack.decode(path.read_bytes(), type=Numbers)
