"""A traced run leaves a file, and steps go on as if nothing had been watched."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from radixserve.engine.profiling import FIRST_STEP, NUM_STEPS, ProfiledRunner, busy_share
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


def test_some_steps_are_traced_into_a_file_and_all_are_run(tmp_path: Path) -> None:
    inner = CountingRunner()
    runner = ProfiledRunner(inner, tmp_path / "traces")  # type: ignore[arg-type]
    steps = list(range(FIRST_STEP + NUM_STEPS + 3))
    for step in steps:
        runner.launch(StepPlan(step, (), NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, ()))
    assert inner.steps == steps
    (path,) = (tmp_path / "traces").iterdir()
    with gzip.open(path) as file:
        assert "traceEvents" in json.load(file)


def test_busy_share_counts_what_overlaps_once() -> None:
    assert busy_share([(0, 2), (1, 3), (6, 10), (7, 8)]) == pytest.approx(0.7)
