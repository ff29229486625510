"""``--profile``: a torch trace of some steps, and how much of their time the device was busy."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from radixserve.engine.step import PendingStep, Runner, StepPlan

_log = logging.getLogger(__name__)

# Steps of the engine's life: past the first ones, which load what is used for the first time.
FIRST_STEP, NUM_STEPS = 100, 50


class ProfiledRunner:
    """A ``Runner`` that traces ``NUM_STEPS`` steps of another and writes the trace into ``folder``."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        self._runner = runner
        self._folder = folder
        self._num_launched = 0
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities)

    def launch(self, plan: StepPlan) -> PendingStep:
        if self._num_launched == FIRST_STEP:
            self._profile.start()
        elif self._num_launched == FIRST_STEP + NUM_STEPS:
            self._write()
        self._num_launched += 1
        return self._runner.launch(plan)

    def _write(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-{FIRST_STEP}-{FIRST_STEP + NUM_STEPS - 1}.json.gz"
        self._profile.export_chrome_trace(str(path))
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events() or ()
            if event.device_type.name == "CUDA"
        ]
        busy = f", device busy {busy_share(spans):.1%} of the time" if spans else ""
        _log.info("wrote %s: open it in chrome://tracing or ui.perfetto.dev%s", path, busy)


def busy_share(spans: list[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end in which at least one of the (start, end) goes on."""
    ordered = sorted(spans)
    begin = end = ordered[0][0]
    busy = 0.0
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / (end - begin)
