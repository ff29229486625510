"""A day of requests through the real scheduler: ``python benchmarks/day.py --hours 24 --load 1.2``.

Only the device and the clock are made up: a step takes so long per step, prompt token and decode, and time goes on by
that. Three API keys of weights 2, 1 and 1 send requests at random times, few at night and many at noon, the second one
three times as many as the others. Prints how busy the device was, how long requests waited, what was refused, and how
fair that was: Jain's index of the tokens served over the weights, while all three were waiting.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.messages import Rejected, Submit
from radixserve.engine.pipeline import StepPipeline
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.scheduler import Scheduler, SchedulerLimits
from radixserve.engine.step import Int32s, StepPlan, StepResult
from radixserve.kvcache.manager import CacheManager
from radixserve.kvcache.radix import RadixPrefixCache

FRONTEND = b"day"
WEIGHTS = {"a": 2.0, "b": 1.0, "c": 1.0}
DEMAND = {"a": 0.2, "b": 0.6, "c": 0.2}  # shares of the requests
VOCAB_SIZE, PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN, STEP_TOKENS = 32_000, 16, 4096, 4096, 2048
SYSTEM_PROMPTS, SYSTEM_TOKENS = 8, 200
MEAN_TAIL, MEAN_OUTPUT = 150, 60
# Of the device, a CPU: seconds a step takes by itself, and more for each token.
STEP_S, PREFILL_S, DECODE_S = 0.08, 4e-3, 5e-3


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Device:
    """Computes nothing; lets time go on. Keeps count of the seconds that it was busy."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.busy_s = 0.0

    def launch(self, plan: StepPlan) -> Device:
        num_decodes = len(plan.decode_rows)
        seconds = STEP_S + PREFILL_S * (plan.num_tokens - num_decodes) + DECODE_S * num_decodes
        self._clock.now += seconds
        self.busy_s += seconds
        self._num_samples = plan.num_samples
        return self

    def sample(self, masks: Int32s) -> None:
        raise AssertionError("no request of this day has a grammar")

    def result(self) -> StepResult:
        return StepResult(np.full(self._num_samples, 7, np.int32), np.zeros(self._num_samples, np.bool_))


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    tenant: str
    prompt: Int32s
    max_tokens: int


@dataclass
class Report:
    """What the day was like. ``waits_s``: of each request that was started, by tenant. ``contended``: tokens served to
    each tenant while all of them had requests waiting."""

    hours: float
    num_requests: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    waits_s: dict[str, list[float]] = field(default_factory=lambda: {tenant: [] for tenant in WEIGHTS})
    contended: Counter[str] = field(default_factory=Counter)
    utilisation: float = 0.0
    cached_share: float = 0.0
    num_retracted: int = 0
    num_steps: int = 0

    @property
    def fairness(self) -> float:
        """Jain's index: 1 if all got the same for their weight, 1/3 if one got everything."""
        shares = np.array([self.contended[tenant] / weight for tenant, weight in WEIGHTS.items()])
        return float(shares.sum() ** 2 / (len(shares) * (shares**2).sum())) if shares.any() else 1.0

    def wait_s(self, percentile: float, tenant: str | None = None) -> float:
        waits = self.waits_s[tenant] if tenant else [wait for own in self.waits_s.values() for wait in own]
        return float(np.percentile(waits, percentile)) if waits else 0.0


def arrivals(hours: float, load: float, seed: int) -> Iterator[Arrival]:
    """Requests in the order of time. ``load``: what the mean request asks of the device, over what it can do when its
    batches are full, averaged over the day; noon has 1.8 times as much."""
    rng = np.random.default_rng(seed)
    service_s = PREFILL_S * (MEAN_TAIL + 10) + MEAN_OUTPUT * (DECODE_S + STEP_S / SEATS)
    duration_s, mean_rate = hours * 3600, load / service_s
    systems = rng.integers(1, VOCAB_SIZE, (SYSTEM_PROMPTS, SYSTEM_TOKENS), dtype=np.int32)
    tenants, shares = list(DEMAND), list(DEMAND.values())
    now = 0.0
    while (now := now + rng.exponential(1 / (1.8 * mean_rate))) < duration_s:
        if rng.random() > (1 + 0.8 * math.sin(2 * math.pi * now / duration_s - math.pi / 2)) / 1.8:
            continue  # thinned to the rate of this hour
        tail = rng.integers(1, VOCAB_SIZE, 1 + int(rng.exponential(MEAN_TAIL)), dtype=np.int32)[:2000]
        prompt = np.concatenate([systems[rng.integers(SYSTEM_PROMPTS)], tail])
        yield Arrival(now, str(rng.choice(tenants, p=shares)), prompt, 1 + min(int(rng.exponential(MEAN_OUTPUT)), 500))


SEATS = 32
OPTIONS = SchedulerOptions(max_num_seqs=SEATS, max_num_queued_reqs=256, max_queue_time=30)


class Day:
    """One simulation: the scheduler with its clock and device, and what is known of each request."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.clock = Clock()
        self._device = Device(self.clock)
        cache = CacheManager(
            RadixPrefixCache(PAGE_SIZE), NUM_PAGES, options.max_num_seqs, -(-MAX_MODEL_LEN // PAGE_SIZE)
        )
        limits = SchedulerLimits(MAX_MODEL_LEN, VOCAB_SIZE, STEP_TOKENS)
        self.scheduler = Scheduler(cache, limits, options, clock=self.clock)
        self._pipeline = StepPipeline(self.scheduler, self._device, overlap=False)
        self._tenant: dict[int, str] = {}  # of each open request
        self._waiting: Counter[str] = Counter()
        self._next_expiry_s = 0.0

    def run(self, hours: float, load: float, seed: int = 0) -> Report:
        report, coming = Report(hours), arrivals(hours, load, seed)
        following = next(coming, None)
        while following is not None or self.scheduler.requests:
            while following is not None and following.at_s <= self.clock.now:
                self._submit(following, report)
                following = next(coming, None)
            self._expire(report)
            if self._pipeline.advance():
                self._take_events(report)
            elif following is not None:
                self.clock.now = max(self.clock.now, following.at_s)
        stats = self.scheduler.stats()
        self.scheduler.check_integrity()
        report.utilisation = self._device.busy_s / self.clock.now
        report.cached_share = stats.cached_tokens / max(1, stats.prompt_tokens)
        report.num_retracted, report.num_steps = stats.retracted, stats.steps
        return report

    def _submit(self, arrival: Arrival, report: Report) -> None:
        uid, tenant = report.num_requests, arrival.tenant
        report.num_requests += 1
        sampling = SamplingParams(temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True)
        message = Submit(uid, "", arrival.prompt.tobytes(), sampling, tenant=tenant, weight=WEIGHTS[tenant])
        rejected = self.scheduler.submit(FRONTEND, message)
        if rejected is None:
            self._tenant[uid] = tenant
            self._waiting[tenant] += 1
        else:
            report.ends[rejected.code or "refused"] += 1

    def _expire(self, report: Report) -> None:
        if self.clock.now < self._next_expiry_s:
            return
        self._next_expiry_s = self.clock.now + 0.5
        for _, rejected in self.scheduler.expire():
            self._end_of_waiting(rejected, report)

    def _end_of_waiting(self, rejected: Rejected, report: Report) -> None:
        self._waiting[self._tenant.pop(rejected.uid)] -= 1
        report.ends[rejected.code or "refused"] += 1

    def _take_events(self, report: Report) -> None:
        contended = all(self._waiting[tenant] > 0 for tenant in WEIGHTS)
        for outputs in self.scheduler.take_outputs().values():
            for event in outputs.each():
                tenant = self._tenant[event.uid]
                if event.queue_s is not None:
                    self._waiting[tenant] -= 1
                    report.waits_s[tenant].append(event.queue_s)
                if contended:
                    report.contended[tenant] += len(event.token_ids)
                if event.finish is not None:
                    del self._tenant[event.uid]
                    report.ends[event.finish.value] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--load", type=float, default=0.8)
    flags = parser.parse_args()
    began = time.perf_counter()
    report = Day(OPTIONS).run(flags.hours, flags.load)
    print(f"{report.num_requests:,} requests in {flags.hours:g} h, load {flags.load:g}; {report.num_steps:,} steps")
    print(f"utilisation {report.utilisation:.1%}, from the cache {report.cached_share:.1%} of prompts", end="")
    print(f", {report.num_retracted} retractions, fairness {report.fairness:.3f}")
    for tenant in (None, *WEIGHTS):
        waits = ", ".join(f"p{p} {report.wait_s(p, tenant):.2f} s" for p in (50, 95, 100))
        print(f"  waited {'all' if tenant is None else tenant}: {waits}")
    print(f"  ends: {dict(report.ends)}; simulated in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
