"""Prompts beside streams are cut so that steps take no longer than asked, by the time that steps were seen to take."""

from __future__ import annotations

import pytest

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.step import StepPlan
from radixserve.tests.engine.fakes import FakePendingStep, FakeRunner, Harness

_STREAM = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
_TARGET_S = 0.05


class Timed:
    """A harness whose device takes 2 ms for a step and ``token_s`` for each of its tokens, and ``hiccup_s`` for the
    next."""

    def __init__(self, target_itl_s: float | None, overlap: bool, token_s: float = 1e-4) -> None:
        self.now = self.ready_at = self.hiccup_s = 0.0
        self.token_s = token_s
        options = SchedulerOptions(max_num_seqs=16)
        self.harness = Harness(
            page_size=16, num_pages=2000, max_model_len=8192, vocab_size=10_000, step_tokens=2048, overlap=overlap,
            options=options, target_itl_s=target_itl_s, clock=lambda: self.now,
        )  # fmt: skip
        self.steps: list[tuple[StepPlan, float]] = []
        self.harness.runner.launch = self._launch  # type: ignore[method-assign]

    def _launch(self, plan: StepPlan) -> FakePendingStep:
        began = max(self.now, self.ready_at)
        seconds, self.hiccup_s = 0.002 + self.token_s * plan.num_tokens + self.hiccup_s, 0.0
        self.ready_at = done_at = began + seconds
        self.steps.append((plan, seconds))
        result = FakeRunner.launch(self.harness.runner, plan).result()

        class Pending(FakePendingStep):
            def result(pending) -> object:  # type: ignore[override]
                self.now = max(self.now, done_at)
                return result

        return Pending(result)

    def submit(self, length: int, first: int, sampling: SamplingParams = _STREAM) -> None:
        self.harness.submit([(first + 7 * i) % 10_000 for i in range(length)], sampling)

    def mixed(self, since: int) -> list[float]:
        """Seconds of the steps from number ``since`` on that both decode and have a prompt."""
        return [seconds for plan, seconds in self.steps[since:] if plan.chunks and len(plan.decode_rows)]


def timed_streams(target_itl_s: float | None, overlap: bool, token_s: float = 1e-4) -> Timed:
    """Four streams that run, after a long prompt by which the cost of a token is known."""
    timed = Timed(target_itl_s, overlap, token_s)
    timed.submit(600, 5, SamplingParams(temperature=0, max_tokens=1))
    timed.harness.run()
    for number in range(4):
        timed.submit(20, number)
    for _ in range(12):
        timed.harness.advance()
    return timed


@pytest.mark.parametrize("overlap", [False, True])
def test_long_prompts_beside_streams_keep_steps_short(overlap: bool) -> None:
    timed = timed_streams(_TARGET_S, overlap)
    since = len(timed.steps)
    timed.submit(5000, 77, SamplingParams(temperature=0, max_tokens=1))
    timed.harness.run()
    timed.harness.check_outputs()
    mixed = timed.mixed(since)
    assert max(mixed) <= _TARGET_S * 1.02
    assert len(mixed) <= 5000 / 470 + 1, "steps are used up to the target"


@pytest.mark.parametrize("overlap", [False, True])
def test_without_a_target_a_prompt_gets_the_budget(overlap: bool) -> None:
    timed = timed_streams(None, overlap)
    since = len(timed.steps)
    timed.submit(5000, 77, SamplingParams(temperature=0, max_tokens=1))
    timed.harness.run()
    assert max(timed.mixed(since)) > 0.2


def test_a_prompt_alone_gets_the_budget() -> None:
    timed = Timed(_TARGET_S, overlap=True)
    for first in (1, 2):
        since = len(timed.steps)
        timed.submit(4000, first, SamplingParams(temperature=0, max_tokens=1))
        timed.harness.run()
        assert timed.steps[since][0].num_tokens == 2048


def test_a_step_that_was_held_up_does_not_count() -> None:
    timed = timed_streams(_TARGET_S, overlap=True)
    timed.submit(4000, 77, SamplingParams(temperature=0, max_tokens=1))
    for _ in range(3):
        timed.harness.advance()
    timed.hiccup_s = 5.0
    timed.harness.advance()
    since = len(timed.steps)
    timed.harness.run()
    mixed = timed.mixed(since)
    assert min(mixed[:-1]) > 0.7 * _TARGET_S and max(mixed) <= _TARGET_S * 1.05


def test_prompts_advance_where_the_target_cannot_be_met() -> None:
    timed = timed_streams(0.001, overlap=True)
    since = len(timed.steps)
    timed.submit(3000, 77, SamplingParams(temperature=0, max_tokens=1))
    timed.harness.run()
    timed.harness.check_outputs()
    assert all(256 <= plan.num_tokens <= 256 + 4 for plan, _ in timed.steps[since : since + 8] if plan.chunks)


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_that_cost_nothing_beside_decodes_are_not_cut(overlap: bool) -> None:
    timed = timed_streams(_TARGET_S, overlap, token_s=0.0)
    for number in range(20):  # enough to outweigh the long prompt at the start
        timed.submit(600, 100 + number)
        timed.harness.advance()
    timed.harness.advance()
    assert max(plan.num_tokens for plan, _ in timed.steps[-20:]) > 600
    timed.harness.run()
