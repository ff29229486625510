"""Who waits how long, in steps: nobody starves, whatever else is being computed."""

from itertools import pairwise

import pytest

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine.fakes import Answer, Harness


def text(length: int, first: int) -> list[int]:
    return [first % 49 + 1, first // 49 + 1, *((5 * i + first) % 49 + 1 for i in range(2, length))]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def harness_of(step_tokens: int, *, max_num_seqs: int = 32, overlap: bool = True) -> Harness:
    options = SchedulerOptions(max_num_seqs=max_num_seqs)
    return Harness(
        page_size=16,
        num_pages=1024,
        max_model_len=8192,
        step_tokens=step_tokens,
        overlap=overlap,
        options=options,
    )


def advance_until(harness: Harness, answer: Answer, num_tokens: int) -> None:
    while len(answer.tokens) < num_tokens:
        assert harness.advance()


def longest_gap(answer: Answer) -> int:
    return max(later - earlier for earlier, later in pairwise(answer.times))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_gets_a_token_in_every_step_while_long_prompts_are_computed(overlap: bool) -> None:
    harness = harness_of(128, overlap=overlap)
    victim = harness.submit(text(10, 1), greedy(100))
    advance_until(harness, victim, 20)
    for first in range(2, 4):
        harness.submit(text(3000, first), greedy(1))
    harness.run()
    harness.check_outputs()
    assert longest_gap(victim) == 1


def test_a_short_prompt_passes_long_ones() -> None:
    harness = harness_of(128)
    long_ones = [harness.submit(text(1500, first), greedy(1)) for first in range(1, 5)]
    for _ in range(5):
        harness.advance()
    sent = harness.time
    short = harness.submit(text(40, 9), greedy(4))
    harness.run()
    assert short.times[0] - sent <= 3
    assert all(short.times[0] < answer.times[0] for answer in long_ones)


def test_short_prompts_cannot_starve_a_long_one() -> None:
    """A stream of short prompts that would fill every step slows a long prompt to half its speed, not more."""
    alone = harness_of(128)
    reference = alone.submit(text(3000, 1), greedy(1))
    alone.run()
    harness = harness_of(128)
    answer = harness.submit(text(3000, 1), greedy(1))
    number = 2
    while not answer.tokens:
        for _ in range(2):
            number += 1
            harness.submit(text(100, number), greedy(1))
        harness.advance()
    assert answer.times[0] <= 2 * reference.times[0] + 2
    harness.run()


def test_prefill_goes_on_beside_as_many_decodes_as_may_run() -> None:
    harness = harness_of(16, max_num_seqs=64)
    streams = [harness.submit(text(3, 2 + i), greedy(300)) for i in range(11)]
    for answer in streams:
        advance_until(harness, answer, 1)
    sent = harness.time
    late = harness.submit(text(100, 1), greedy(1))
    advance_until(harness, late, 1)
    assert late.times[0] - sent <= 100 / (16 // 4) + 2
    assert all(longest_gap(answer) == 1 for answer in streams)


def test_a_burst_of_prompts_uses_the_whole_budget() -> None:
    harness = harness_of(256, max_num_seqs=64)
    lengths = [30 + 17 * i % 400 for i in range(60)]
    for first, length in enumerate(lengths, start=1):
        harness.submit(text(length, first), greedy(1))
    harness.run()
    harness.check_outputs()
    prefill_steps = [plan for plan in harness.runner.plans if plan.chunks]
    assert len(prefill_steps) <= sum(lengths) / 256 + 2


def test_a_request_that_waits_for_pages_is_not_overtaken_for_ever() -> None:
    harness = Harness(page_size=4, num_pages=64, max_model_len=256, options=SchedulerOptions(max_num_seqs=8))
    running = harness.submit(text(40, 1), greedy(60))
    harness.advance()
    large = harness.submit(text(220, 2), greedy(4))
    small = []
    for i in range(40):
        small.append(harness.submit(text(10, 3 + i), greedy(10)))
        harness.advance()
    harness.run()
    harness.check_outputs()
    assert running.times[-1] < min(answer.times[0] for answer in small), "the small ones stay behind the large one"
    assert large.times[0] - running.times[-1] <= 220 / 64 + 2
