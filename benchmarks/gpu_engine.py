"""Where a decode step of the whole engine spends its time: host microseconds by phase, device time by kernel, gaps.

`python benchmarks/gpu_engine.py FOLDER [--batches 1 64 256] [--prompt-len 600]`; FOLDER needs only a config.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from radixserve.configs.schema import ServeConfig
from radixserve.engine.build import build_engine
from radixserve.engine.built import new_scheduler
from radixserve.engine.messages import Submit
from radixserve.engine.pipeline import StepPipeline
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.step import PendingStep, StepPlan, StepResult

FRONTEND = b"benchmark"
STEPS = 100
PROFILED_STEPS = 16


class Clock:
    """Seconds of the host by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds[phase] += time.perf_counter() - start

        return timed_call


class TimedRunner:
    """A ``Runner`` whose launches and waits are timed."""

    def __init__(self, launch: Callable[[StepPlan], PendingStep], clock: Clock) -> None:
        self._launch = clock.timed("launch", launch)
        self._clock = clock

    def launch(self, plan: StepPlan) -> PendingStep:
        return TimedStep(self._clock.timed("wait", self._launch(plan).result))


class TimedStep:
    def __init__(self, result: Callable[[], StepResult]) -> None:
        self.result = result


class Engine:
    """An engine whose phases are timed, and a source of requests that never end."""

    def __init__(self, config: ServeConfig) -> None:
        built = build_engine(config)
        self.description = built.description
        self.clock = Clock()
        self._rng = random.Random(0)
        self._scheduler = new_scheduler(built, config)
        self._pipeline = StepPipeline(self._scheduler, TimedRunner(built.runner.launch, self.clock), overlap=True)
        self._num_requests = 0
        for phase in ("schedule", "complete", "take_outputs"):
            setattr(self._scheduler, phase, self.clock.timed(phase, getattr(self._scheduler, phase)))

    def submit(self, count: int, prompt_len: int) -> None:
        for _ in range(count):
            self._num_requests += 1
            ids = np.array([self._rng.randrange(10_000) for _ in range(prompt_len)], np.dtype("<i4"))
            sampling = SamplingParams(temperature=0.6 if count > 1 else 0.0, ignore_eos=True)
            self._scheduler.submit(FRONTEND, Submit(self._num_requests, "", ids.tobytes(), sampling))

    def step(self, count: int) -> float:
        """Run steps until the device is idle; returns the seconds that took."""
        start = time.perf_counter()
        for _ in range(count):
            self._pipeline.advance()
            self._scheduler.take_outputs()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def abort_all(self) -> None:
        self._scheduler.abort_request("")
        while self._pipeline.advance():
            pass
        self._scheduler.take_outputs()


def measure(engine: Engine, batch: int, prompt_len: int) -> None:
    engine.submit(batch, prompt_len)
    engine.step(20 + batch * prompt_len // 4096)  # all prompts are computed, and some tokens
    engine.clock.seconds.clear()
    seconds = engine.step(STEPS)
    phases = {name: value / STEPS for name, value in engine.clock.seconds.items()}
    phases["rest"] = seconds / STEPS - sum(phases.values())
    shown = ", ".join(f"{name} {1e6 * value:.0f}" for name, value in phases.items())
    print(f"batch {batch}, prompts of {prompt_len}: {1e6 * seconds / STEPS:.0f} us a step; host: {shown}")
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        engine.step(PROFILED_STEPS)
    report([event for event in found.events() if event.device_type.name == "CUDA"])
    engine.abort_all()


def report(events: list[Any]) -> None:
    """Share of the time in which the device was busy, its kernels, and the gaps by what came before and after."""
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    busy, end, last = 0.0, spans[0][0], ""
    gaps: dict[str, float] = defaultdict(float)
    for begin, stop, name in spans:
        if begin > end:
            gaps[f"{last[:40]} -> {name[:40]}"] += begin - end
        busy += max(0.0, stop - max(begin, end))
        if stop > end:
            end, last = stop, name
    span = end - spans[0][0]
    print(f"  while profiled: {span / PROFILED_STEPS:.0f} us a step, device busy {busy / span:.1%}")
    kernels: dict[str, list[float]] = defaultdict(list)
    for begin, stop, name in spans:
        kernels[name].append(stop - begin)
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:12]:
        count, total = len(times) / PROFILED_STEPS, sum(times) / PROFILED_STEPS
        print(f"  {total:9.1f} us, {count:4.0f} x {statistics.median(times):7.2f}  {name[:80]}")
    for pair, total in sorted(gaps.items(), key=lambda item: -item[1])[:5]:
        print(f"  {total / PROFILED_STEPS:9.1f} us idle: {pair}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--prompt-len", type=int, default=600)
    options = parser.parse_args()
    engine = Engine(ServeConfig(model=options.folder, load_format="dummy", max_model_len=4096))
    print(engine.description)
    for batch in options.batches:
        measure(engine, batch, options.prompt_len)


if __name__ == "__main__":
    main()
