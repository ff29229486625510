"""A traced run leaves a file, and steps go on as if nothing had been watched."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from radixserve.engine.errors import ConfigError
from radixserve.engine.profiling import FIRST_STEP, NUM_STEPS, ProfiledRunner, busy_share, make_trace_folder
from radixserve.engine.step import StepPlan, StepResult

NOTHING = np.zeros(0, np.int32)


class CountingRunner:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def launch(self, plan: StepPlan) -> CountingRunner:
        self.steps.append(plan.step)
        return self

    def result(self) -> StepResult:
        raise AssertionError("nobody asks")


STEPS = list(range(FIRST_STEP + NUM_STEPS + 3))


def run_profiled(folder: Path) -> list[int]:
    """Returns the steps that were run."""
    inner = CountingRunner()
    runner = ProfiledRunner(inner, folder)  # type: ignore[arg-type]
    for step in STEPS:
        runner.launch(StepPlan(step, (), NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, ()))
    return inner.steps


def test_some_steps_are_traced_into_a_file_and_all_are_run(tmp_path: Path) -> None:
    make_trace_folder(str(tmp_path / "traces"))
    assert run_profiled(tmp_path / "traces") == STEPS
    (path,) = (tmp_path / "traces").iterdir()
    with gzip.open(path) as file:
        assert "traceEvents" in json.load(file)


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below", Path("/proc")):
        with pytest.raises(ConfigError, match=f"profile {path} is no folder to write to: .*; use another --profile"):
            make_trace_folder(str(path))


def test_a_trace_that_cannot_be_written_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run_profiled(tmp_path / "removed meanwhile") == STEPS
    assert "cannot write the trace" in caplog.text


def test_busy_share_counts_what_overlaps_once() -> None:
    assert busy_share([(0, 2), (1, 3), (6, 10), (7, 8)]) == pytest.approx(0.7)
