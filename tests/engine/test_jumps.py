"""Forced tokens are appended at once: fewer steps, the same tokens, and not a page lost, whatever runs beside it."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.messages import FinishReason
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine.fakes import Answer, Arrival, Harness, Reciting

VOCAB = 12  # so small that texts share prefixes and that stops occur
GREEDY = SamplingParams(temperature=0, max_tokens=100)
TEXT = [1 + (i * i + i // 3) % 11 for i in range(60)]


def recited(length: int, *, jumps: bool, overlap: bool, sampling: SamplingParams = GREEDY) -> tuple[Harness, Answer]:
    harness = Harness(vocab_size=VOCAB, overlap=overlap)
    answer = harness.submit(TEXT[:9], sampling, constraint=Reciting(length, jumps=jumps))
    harness.run()
    harness.check_outputs()
    return harness, answer


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_tokens_need_no_steps_of_their_own(overlap: bool) -> None:
    slow, walked = recited(50, jumps=False, overlap=overlap)
    fast, jumped = recited(50, jumps=True, overlap=overlap)
    assert (jumped.tokens, jumped.finish) == (walked.tokens, walked.finish) and len(jumped.tokens) == 51
    # Five runs of seven: with overlap the step in flight at a jump has sampled in vain.
    assert len(slow.runner.plans) - len(fast.runner.plans) == 5 * (6 if overlap else 7)
    chunks = [len(chunk.token_ids) for plan in fast.runner.plans for chunk in plan.chunks]
    assert chunks == [9] + [7 if overlap else 8] * 5, "what has KV is not computed again"
    assert fast.scheduler.stats().forced_tokens == 35
    assert fast.scheduler.stats().generated_tokens == slow.scheduler.stats().generated_tokens == 51


def test_forced_tokens_come_in_the_event_of_the_token_before_them() -> None:
    _, answer = recited(25, jumps=True, overlap=True)
    assert [len(event.token_ids) for event in answer.events] == [1, 1, 8, 1, 1, 8, 1, 1, 1 + 2 + 1 - 1, 1]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_the_limit_of_tokens_holds_within_a_jump(max_tokens: int, overlap: bool) -> None:
    sampling = msgspec.structs.replace(GREEDY, max_tokens=max_tokens)
    _, answer = recited(30, jumps=True, overlap=overlap, sampling=sampling)
    assert len(answer.tokens) == max_tokens and answer.finish is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_token_ends_the_output_though_it_is_forced(overlap: bool) -> None:
    forced = 1 + 5 * 5 % 11
    sampling = msgspec.structs.replace(GREEDY, stop_token_ids=(forced,), min_tokens=4)
    _, answer = recited(30, jumps=True, overlap=overlap, sampling=sampling)
    assert answer.finish is FinishReason.STOP and answer.tokens[-1] == forced
    assert answer.events[-1].stop_token_id == forced


@pytest.mark.parametrize("rules", [{"logprobs": 0}, {"logit_bias": {5: 1.0}}])
def test_who_wants_the_logits_of_each_step_gets_each_step(rules: dict[str, object]) -> None:
    _, answer = recited(25, jumps=True, overlap=True, sampling=msgspec.structs.replace(GREEDY, **rules))
    assert all(len(event.token_ids) == 1 for event in answer.events)


def test_the_runner_is_told_what_was_not_sampled_so_that_penalties_count_it() -> None:
    harness, answer = recited(25, jumps=True, overlap=True)
    setups = [setup for plan in harness.runner.plans for setup in plan.setups]
    lengths = [9, 9 + 10, 9 + 20]
    assert [len(setup.token_ids) for setup in setups[: len(lengths)]] == lengths
    assert all(setup.token_ids.tolist() == [*TEXT[:9], *answer.tokens][: len(setup.token_ids)] for setup in setups)
    assert all(setup.prompt_len == 9 for setup in setups)


def test_a_sample_that_came_too_late_still_tells_that_the_model_failed() -> None:
    harness = Harness(vocab_size=VOCAB)
    asked: list[None] = []

    def fail_beside_a_jump() -> None:
        asked.append(None)
        if len(asked) == 3:
            harness.runner.broken_seeds.add(77)

    sampling = msgspec.structs.replace(GREEDY, seed=77)
    answer = harness.submit(TEXT[:9], sampling, constraint=Reciting(50, on_forced=fail_beside_a_jump))
    other = harness.submit(TEXT[:9], GREEDY, constraint=Reciting(50))
    while harness.advance():
        harness.runner.broken_seeds.clear()  # only the step in flight was broken
    assert answer.finish is FinishReason.ERROR and len(answer.tokens) == 10
    assert other.finish is FinishReason.STOP


class Ditto(Reciting):
    """What it forces can be written with token 7, or with 5 and 6."""

    def fill_mask(self, words: np.ndarray) -> None:
        words[:] = 1 << 6 if self.half else 1 << 5 | 1 << 7

    def accept(self, token_id: int) -> bool:
        assert token_id == 6 if self.half else token_id in (5, 7)
        self.half = token_id == 5
        return False

    def forced(self) -> list[int]:
        return [6 if self.half else 7, 7]

    half = False


def test_a_ban_on_stops_holds_where_forced_text_could_be_written_with_one() -> None:
    harness = Harness(vocab_size=VOCAB)
    sampling = SamplingParams(temperature=0, max_tokens=20, min_tokens=10, stop_token_ids=(7,))
    answer = harness.submit(TEXT[:9], sampling, constraint=Ditto(0))
    harness.run()
    assert answer.tokens[:10] == [5, 6] * 5


def test_a_jump_from_the_first_token_keeps_what_its_event_has_to_say() -> None:
    harness = Harness(vocab_size=VOCAB)
    answer = harness.submit(TEXT[:9], SamplingParams(temperature=0, max_tokens=20, seed=2), constraint=Ditto(0))
    harness.run()
    first = next(event for event in answer.events if event.token_ids)
    assert len(first.token_ids) == 3 and first.queue_s is not None
    assert all(event.queue_s is None for event in answer.events[1:])


@dataclass(frozen=True)
class Recital(Arrival):
    prompt_len: int
    length: int | None  # of its constraint; None: it is free


_samplings = st.builds(
    lambda seed, max_tokens, greedy, stops, min_tokens, prompt_logprobs: SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=0.0 if greedy else 1.0,
        stop_token_ids=stops,
        min_tokens=min(min_tokens, max_tokens or min_tokens),
        prompt_logprobs=prompt_logprobs,
    ),
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from([None, 2, 9, 40]),
    greedy=st.booleans(),
    stops=st.sampled_from([(), (), (3,)]),
    min_tokens=st.sampled_from([0, 0, 12]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
_arrivals = st.lists(
    st.builds(
        Recital,
        steps_before=st.integers(0, 6),
        prompt_len=st.integers(1, 60),
        length=st.sampled_from([None, 4, 17, 30, 45]),
        sampling=_samplings,
        aborted_after=st.sampled_from([None, None, None, 0, 1, 5]),
    ),
    min_size=1,
    max_size=16,
)


def _play(harness: Harness, arrivals: list[Recital]) -> None:
    def submit(arrival: Recital) -> None:
        constraint = None if arrival.length is None else Reciting(arrival.length)
        harness.submit(TEXT[: arrival.prompt_len], arrival.sampling, constraint=constraint)

    harness.play(arrivals, submit)


@settings(max_examples=40)
@given(
    arrivals=_arrivals,
    page_size=st.sampled_from([1, 4, 16]),
    pool_tokens=st.sampled_from([96, 144, 400]),
    step_tokens=st.sampled_from([1, 2, 7, 16, 64]),
    max_num_seqs=st.sampled_from([1, 2, 4, 16]),
    policy=st.sampled_from(["fcfs", "lpm", "priority"]),
    overlap=st.booleans(),
    radix=st.booleans(),
    broken_steps=st.sets(st.integers(1, 20).map(lambda i: 4 * i), max_size=2),
)
def test_every_request_gets_its_own_text_and_one_end(
    arrivals: list[Recital],
    page_size: int,
    pool_tokens: int,
    step_tokens: int,
    max_num_seqs: int,
    policy: str,
    overlap: bool,
    radix: bool,
    broken_steps: set[int],
) -> None:
    harness = Harness(
        page_size=page_size,
        num_pages=pool_tokens // page_size,
        max_model_len=96,
        vocab_size=VOCAB,
        step_tokens=step_tokens,
        overlap=overlap,
        radix=radix,
        options=SchedulerOptions.model_validate({"max_num_seqs": max_num_seqs, "schedule_policy": policy}),
    )
    harness.runner.broken_steps = broken_steps
    _play(harness, arrivals)


@settings(max_examples=12)
@given(arrivals=_arrivals, pool_tokens=st.sampled_from([96, 400]))
def test_overlap_changes_no_answer(arrivals: list[Recital], pool_tokens: int) -> None:
    told = []
    for overlap in (False, True):
        harness = Harness(
            num_pages=pool_tokens // 4, max_model_len=96, vocab_size=VOCAB, step_tokens=16, overlap=overlap
        )
        _play(harness, [replace(arrival, aborted_after=None) for arrival in arrivals])
        told.append([(answer.tokens, answer.finish, bool(answer.rejected)) for answer in harness.answers.values()])
    assert told[0] == told[1]


def test_jumps_and_retractions_go_together() -> None:
    harness = Harness(vocab_size=VOCAB, num_pages=90, options=SchedulerOptions(max_num_seqs=8))
    sampling = SamplingParams(temperature=0, max_tokens=200)
    answers = [harness.submit(TEXT[: 5 + n], sampling, constraint=Reciting(150)) for n in range(4)]
    harness.run()
    harness.check_outputs()
    stats = harness.scheduler.stats()
    assert stats.retracted and stats.forced_tokens >= 4 * 90
    assert all(len(answer.tokens) == 151 for answer in answers)
