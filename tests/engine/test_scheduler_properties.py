"""Random arrivals, aborts, stops, failures and tiny pools: fake runner and harness see any wrong page and any loss."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.messages import FinishReason
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine.fakes import Arrival, Harness

_VOCAB = 12  # so small that texts share prefixes and that stops occur


@dataclass(frozen=True)
class Prompted(Arrival):
    base: int  # which common text it begins with
    base_len: int
    tail: tuple[int, ...]
    priority: int
    namespace: str


def _sampling() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        lambda seed, max_tokens, ignore_eos, greedy, stops, min_tokens, prompt_logprobs: SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            temperature=0.0 if greedy else 1.0,
            stop_token_ids=stops,
            min_tokens=min(min_tokens, max_tokens or min_tokens),
            prompt_logprobs=prompt_logprobs,
        ),
        seed=st.integers(0, 20),
        max_tokens=st.sampled_from([None, 1, 2, 9, 40, 100]),
        ignore_eos=st.booleans(),
        greedy=st.booleans(),
        stops=st.sampled_from([(), (3,), (4, 5)]),
        min_tokens=st.sampled_from([0, 0, 3, 30]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )


_arrivals = st.lists(
    st.builds(
        Prompted,
        steps_before=st.integers(0, 6),
        base=st.integers(0, 1),
        base_len=st.integers(1, 60),
        tail=st.lists(st.integers(0, _VOCAB - 1), max_size=6).map(tuple),
        sampling=_sampling(),
        priority=st.integers(0, 2),
        namespace=st.sampled_from(["", "", "", "other"]),
        aborted_after=st.sampled_from([None, None, None, 0, 1, 5]),
    ),
    min_size=1,
    max_size=20,
)
_TEXTS = [[(i * i + i // 3) % _VOCAB for i in range(60)], [(i * 5 + i // 7) % _VOCAB for i in range(60)]]


def _play(harness: Harness, arrivals: list[Prompted]) -> None:
    def submit(arrival: Prompted) -> None:
        harness.submit(
            [*_TEXTS[arrival.base][: arrival.base_len], *arrival.tail],
            arrival.sampling,
            priority=arrival.priority,
            namespace=arrival.namespace,
        )

    harness.play(arrivals, submit)


@settings(max_examples=150)
@given(
    arrivals=_arrivals,
    page_size=st.sampled_from([1, 4, 16]),
    pool_tokens=st.sampled_from([64, 96, 144, 400]),
    step_tokens=st.sampled_from([1, 2, 7, 16, 64]),
    max_num_seqs=st.sampled_from([1, 2, 4, 16]),
    policy=st.sampled_from(["fcfs", "lpm", "priority"]),
    overlap=st.booleans(),
    radix=st.booleans(),
    broken_steps=st.sets(st.integers(1, 40).map(lambda i: 4 * i), max_size=3),
)
def test_every_request_gets_its_own_text_and_one_end(
    arrivals: list[Prompted],
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
        max_model_len=120,
        vocab_size=_VOCAB,
        step_tokens=step_tokens,
        overlap=overlap,
        radix=radix,
        options=SchedulerOptions.model_validate({"max_num_seqs": max_num_seqs, "schedule_policy": policy}),
    )
    harness.runner.broken_steps = broken_steps
    _play(harness, arrivals)


@settings(max_examples=40)
@given(arrivals=_arrivals, page_size=st.sampled_from([1, 4, 16]), pool_tokens=st.sampled_from([96, 400]))
def test_overlap_changes_no_answer(arrivals: list[Prompted], page_size: int, pool_tokens: int) -> None:
    told = []
    for overlap in (False, True):
        harness = Harness(
            page_size=page_size,
            num_pages=pool_tokens // page_size,
            max_model_len=120,
            vocab_size=_VOCAB,
            step_tokens=16,
            overlap=overlap,
        )
        _play(harness, [a for a in arrivals if a.aborted_after is None])
        told.append([(answer.tokens, answer.finish, bool(answer.rejected)) for answer in harness.answers.values()])
    assert told[0] == told[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_abort_storm(overlap: bool, page_size: int) -> None:
    """Streams that vanish at every moment, again and again, on a pool that is too small for them."""
    harness = Harness(page_size=page_size, num_pages=1024 // page_size, step_tokens=48, overlap=overlap)
    forever = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    brief = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for round_number in range(3):
        first = len(harness.answers)
        for i in range(60):
            length = 3 + (37 * i + round_number) % 150
            harness.submit([(i + k * k) % 50 for k in range(length)], brief if i % 5 == 0 else forever)
            if i % 3 == 0:
                harness.scheduler.abort(b"f", first + (i * 7) % (i + 1))
            for _ in range(i % 4):
                harness.advance()
        for i in range(0, 60, 2):
            harness.scheduler.abort(b"f", first + (i * 11) % 60)
            harness.advance()
        harness.scheduler.abort_request("")
        harness.collect()
        harness.run()
        harness.check_outputs()
    assert all(answer.finish in (FinishReason.ABORT, FinishReason.LENGTH) for answer in harness.answers.values())


def test_many_requests_on_a_tiny_pool_all_finish() -> None:
    """Far more than fits, all of them long: retraction after retraction, and every text is right."""
    harness = Harness(page_size=4, num_pages=48, max_model_len=180, step_tokens=32, vocab_size=50)
    for i in range(24):
        rules = SamplingParams(seed=i, max_tokens=100 + i, ignore_eos=True)
        harness.submit([(i + 3 * k) % 50 for k in range(5 + i)], rules)
    harness.run()
    harness.check_outputs()
    stats = harness.scheduler.stats()
    assert stats.finished == 24 and stats.retracted >= 10
