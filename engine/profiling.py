"""``--profile``: a torch trace of some steps, and how much of their time the device was busy."""

import logging
import math
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from radixserve.engine.errors import ConfigError
from radixserve.engine.step import PendingStep, Runner, StepPlan

_log = logging.getLogger(__name__)

# Steps of the engine's life: past the first ones, which load what is used for the first time.
FIRST_STEP, NUM_STEPS = 100, 50


def make_trace_folder(path: str) -> None:
    """Raises ``ConfigError`` when no trace could be written there: better now than after ``FIRST_STEP`` steps."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"profile {path} is no folder to write to: {error.strerror}; use another --profile"
        ) from error


class ProfiledRunner:
    """A ``Runner`` that traces ``NUM_STEPS`` steps of another and writes the trace into ``folder``. A trace that cannot
    be written (the disk is full) costs no request."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        self._runner = runner
        self._folder = folder
        self._num_launched = 0
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities)

    def launch(self, plan: StepPlan) -> PendingStep:
        step, self._num_launched = self._num_launched, self._num_launched + 1
        if step == FIRST_STEP:
            self._profile.start()
        elif step == FIRST_STEP + NUM_STEPS:
            try:
                self._write()
            except OSError as error:
                _log.error("cannot write the trace into %s: %s", self._folder, error)
        return self._runner.launch(plan)

    def _write(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        path = self._folder / f"steps-{FIRST_STEP}-{FIRST_STEP + NUM_STEPS - 1}.json.gz"
        self._profile.export_chrome_trace(str(path))
        on_device = [event.time_range for event in self._profile.events() or () if event.device_type.name == "CUDA"]
        spans = [(time.start, time.end) for time in on_device]
        busy = f", device busy {busy_share(spans):.1%} of the time" if spans else ""
        _log.info("wrote %s: open it in chrome://tracing or ui.perfetto.dev%s", path, busy)


def busy_share(spans: list[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end in which at least one of the (start, end) goes on."""
    busy, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / (end - min(spans)[0])
