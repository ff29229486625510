"""What the scheduler costs per step, without a model: ``python benchmarks/scheduler_step.py``.

Prints, for pure decode steps of N requests, the microseconds of planning (schedule), of taking results in (complete)
and of encoding the messages; and for a stream of prompts the cost of admission and prefill planning.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.messages import Outputs, Submit
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


def new_scheduler(num_requests: int, page_size: int, step_tokens: int) -> Scheduler:
    cache = CacheManager(RadixPrefixCache(page_size), 1_000_000 // page_size, num_requests, 8192 // page_size)
    limits = SchedulerLimits(max_model_len=8192, vocab_size=VOCAB_SIZE, step_tokens=step_tokens)
    return Scheduler(cache, limits, SchedulerOptions(max_num_seqs=num_requests, max_num_queued_reqs=100_000))


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
    for events in scheduler.take_events().values():
        msgspec.msgpack.encode(Outputs(events))
    encoded = time.perf_counter()
    return plan, Times(1e6 * (planned - start), 1e6 * (completed - began), 1e6 * (encoded - completed))


def submit_all(scheduler: Scheduler, num_requests: int, prompt_len: int, max_tokens: int) -> None:
    rng = np.random.default_rng(0)
    rules = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for uid in range(num_requests):
        prompt = rng.integers(1, VOCAB_SIZE, prompt_len, dtype=np.int32)
        assert scheduler.submit(FRONTEND, Submit(uid, f"r{uid}", prompt.tobytes(), rules)) is None


def report(name: str, times: list[Times]) -> None:
    parts = [statistics.median(getattr(t, part) for t in times) for part in ("schedule", "complete", "encode")]
    schedule, complete, encode = parts
    print(f"{name:34} {schedule:9.0f} {complete:9.0f} {encode:9.0f} {sum(parts):9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400, help="decode steps to time")
    args = parser.parse_args()
    page_size, steps = args.page_size, args.steps
    print(f"{'median us per step':34} {'schedule':>9} {'complete':>9} {'encode':>9} {'sum':>9}")
    rng = np.random.default_rng(1)
    for num_requests in (1, 32, 256, 1024):
        scheduler = new_scheduler(num_requests, page_size, step_tokens=8192)
        submit_all(scheduler, num_requests, prompt_len=100, max_tokens=steps + 50)
        decodes: list[Times] = []
        prefills: list[Times] = []
        while (step := timed_step(scheduler, rng)) is not None:
            plan, times = step
            (prefills if plan.chunks else decodes).append(times)
        report(f"decode, {num_requests} requests", decodes[10 : steps + 10])
    report("prefill, 81 new prompts of 100", prefills[1:-1])


if __name__ == "__main__":
    main()
