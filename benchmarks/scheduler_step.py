"""What the scheduler costs per step, without a model: ``python benchmarks/scheduler_step.py``.

Prints, for pure decode steps of N requests, the microseconds of planning (schedule), of taking results in (complete)
and of encoding the messages; for a stream of prompts the cost of admission and prefill planning; and the same for
1,024 requests that share 64 prefixes, whose plans tell which decode rows share one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.messages import Submit
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.scheduler import Scheduler, SchedulerLimits
from radixserve.engine.step import StepPlan, StepResult
from radixserve.kvcache.manager import CacheManager
from radixserve.kvcache.radix import RadixPrefixCache

VOCAB_SIZE = 50_000
FRONTEND = b"frontend"


@dataclass
class Times:
    """Microseconds of one step."""

    schedule: float
    complete: float
    encode: float


def new_scheduler(num_requests: int, page_size: int, step_tokens: int, tells_shared: bool = False) -> Scheduler:
    cache = CacheManager(RadixPrefixCache(page_size), 1_000_000 // page_size, num_requests, 8192 // page_size)
    limits = SchedulerLimits(max_model_len=8192, vocab_size=VOCAB_SIZE, step_tokens=step_tokens)
    options = SchedulerOptions(max_num_seqs=num_requests, max_num_queued_reqs=100_000)
    return Scheduler(cache, limits, options, tells_shared=tells_shared)


def timed_step(scheduler: Scheduler, rng: np.random.Generator) -> tuple[StepPlan, Times] | None:
    start = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    if plan is None:
        return None
    tokens = rng.integers(1, VOCAB_SIZE, plan.num_samples, dtype=np.int32)
    result = StepResult(tokens, np.zeros(plan.num_samples, np.bool_))
    began = time.perf_counter()
    scheduler.complete(plan, result)
    completed = time.perf_counter()
    for outputs in scheduler.take_outputs().values():
        msgspec.msgpack.encode(outputs)
    encoded = time.perf_counter()
    return plan, Times(1e6 * (planned - start), 1e6 * (completed - began), 1e6 * (encoded - completed))


def submit_all(scheduler: Scheduler, prompts: Iterable[np.ndarray], max_tokens: int) -> None:
    rules = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for uid, prompt in enumerate(prompts):
        assert scheduler.submit(FRONTEND, Submit(uid, f"r{uid}", prompt.tobytes(), rules)) is None


def random_prompts(count: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB_SIZE, length, dtype=np.int32) for _ in range(count)]


def sharing_prompts() -> list[np.ndarray]:
    """1,024 prompts of 2,048 tokens that 16 of them share each and 128 of their own, shuffled."""
    prefixes, own = random_prompts(64, 2048), random_prompts(1024, 128)
    prompts = [np.concatenate([prefixes[number // 16], tail]) for number, tail in enumerate(own)]
    random.Random(0).shuffle(prompts)
    return prompts


def timed_run(scheduler: Scheduler) -> tuple[list[Times], list[Times]]:
    """Times of the steps with prompts, and of those without."""
    rng = np.random.default_rng(1)
    prefills: list[Times] = []
    decodes: list[Times] = []
    while (step := timed_step(scheduler, rng)) is not None:
        plan, times = step
        (prefills if plan.chunks else decodes).append(times)
    return prefills, decodes


def report(name: str, times: list[Times]) -> None:
    parts = [statistics.median(getattr(t, part) for t in times) for part in ("schedule", "complete", "encode")]
    schedule, complete, encode = parts
    print(f"{name:42} {schedule:9.0f} {complete:9.0f} {encode:9.0f} {sum(parts):9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400, help="decode steps to time")
    args = parser.parse_args()
    page_size, steps = args.page_size, args.steps
    print(f"{'median us per step':42} {'schedule':>9} {'complete':>9} {'encode':>9} {'sum':>9}")
    for num_requests in (1, 32, 256, 1024):
        scheduler = new_scheduler(num_requests, page_size, step_tokens=8192)
        submit_all(scheduler, random_prompts(num_requests, 100), max_tokens=steps + 50)
        prefills, decodes = timed_run(scheduler)
        report(f"decode, {num_requests} requests", decodes[10 : steps + 10])
    report("prefill, 81 new prompts of 100", prefills[1:-1])
    for tells_shared in (False, True):
        scheduler = new_scheduler(256, page_size, step_tokens=8192, tells_shared=tells_shared)
        submit_all(scheduler, sharing_prompts(), max_tokens=64)
        prefills, decodes = timed_run(scheduler)
        told = ", groups told" if tells_shared else ""
        report(f"shared prefixes, prefill{told}", prefills)
        report(f"shared prefixes, decode 256{told}", decodes)
    cached, prompts = scheduler.stats().cached_tokens, scheduler.stats().prompt_tokens
    print(f"shared prefixes: {cached:,} of {prompts:,} prompt tokens cached")


if __name__ == "__main__":
    main()
