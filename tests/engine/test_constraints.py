"""Requests whose tokens are limited: each token obeys the mask of its own moment, whatever runs beside it."""

import numpy as np
import pytest

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.constraint import forbid, mask_words
from radixserve.engine.messages import FinishReason
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine.fakes import EOS, Answer, Counting, Harness

VOCAB = 50
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def obeys(answer: Answer, length: int) -> bool:
    *tokens, last = answer.tokens
    return last == EOS and len(tokens) == length and all((t - n) % 7 == 0 for n, t in enumerate(tokens))


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_follow_the_tokens_beside_free_requests(overlap: bool) -> None:
    harness = Harness(overlap=overlap, vocab_size=VOCAB)
    free = [harness.submit(range(1, 20 + n), GREEDY) for n in range(3)]
    limited = [harness.submit([*range(1, 45)] * 2 + [n], GREEDY, constraint=Counting(9 + n)) for n in range(3)]
    harness.run()
    assert all(obeys(answer, 9 + n) and answer.finish is FinishReason.STOP for n, answer in enumerate(limited))
    alone = Harness(overlap=overlap, vocab_size=VOCAB)
    assert [answer.tokens for answer in free] == [_again(alone, answer).tokens for answer in free]


def _again(harness: Harness, answer: Answer) -> Answer:
    again = harness.submit(answer.prompt, answer.sampling)
    harness.run()
    return again


def test_a_limited_request_advances_in_every_step_of_an_overlapped_engine() -> None:
    harness = Harness(vocab_size=VOCAB)
    free = harness.submit(range(1, 9), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    limited = harness.submit(range(1, 9), GREEDY, constraint=Counting(20))
    harness.run()
    assert limited.times == list(range(limited.times[0], limited.times[0] + 21))
    assert len(free.tokens) == 30


def test_retraction_keeps_the_place_in_the_grammar() -> None:
    harness = Harness(vocab_size=VOCAB, num_pages=90, options=SchedulerOptions(max_num_seqs=8))
    sampling = SamplingParams(temperature=0, max_tokens=200)
    answers = [harness.submit(range(1, 6 + n), sampling, constraint=Counting(150)) for n in range(4)]
    harness.run()
    assert harness.scheduler.stats().retracted
    assert all(obeys(answer, 150) for answer in answers)


def test_failing_constraint_ends_its_request_alone() -> None:
    harness = Harness(vocab_size=VOCAB)
    failing = harness.submit(range(1, 9), GREEDY, constraint=Counting(20, fails_at=4))
    other = harness.submit(range(1, 9), GREEDY, constraint=Counting(20))
    harness.run()
    assert failing.finish is FinishReason.ERROR and failing.events[-1].error == "too hard"
    assert len(failing.tokens) == 4
    assert obeys(other, 20)


def test_end_of_the_grammar_ends_a_request_that_ignores_the_end_of_sequence() -> None:
    harness = Harness(vocab_size=VOCAB)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    answer = harness.submit(range(1, 9), sampling, constraint=Counting(5))
    aborted = harness.submit(range(1, 9), sampling, constraint=Counting(30))
    for _ in range(6):
        harness.advance()
    harness.scheduler.abort(b"f", 1)
    harness.run()
    assert obeys(answer, 5) and answer.finish is FinishReason.STOP
    assert aborted.finish is FinishReason.ABORT


class OpenEnded(Counting):
    """May end anywhere."""

    def fill_mask(self, words: np.ndarray) -> None:
        words[:] = 0
        words.view(np.uint8)[EOS // 8] = 1 << EOS % 8 | 1 << (EOS + 1) % 8

    def accept(self, token_id: int) -> bool:
        return token_id == EOS


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_that_may_end_anywhere_does_not_end_before_the_least_number_of_tokens(ignore_eos: bool) -> None:
    harness = Harness(vocab_size=VOCAB)
    sampling = SamplingParams(temperature=0, min_tokens=6, max_tokens=40, ignore_eos=ignore_eos)
    answers = [harness.submit(range(1, 9 + n), sampling, constraint=OpenEnded(0)) for n in range(8)]
    harness.run()
    assert all(len(answer.tokens) > 6 and EOS not in answer.tokens[:6] for answer in answers)


def test_broken_step_ends_limited_requests_with_an_error() -> None:
    harness = Harness(vocab_size=VOCAB)
    harness.runner.broken_steps.add(4)
    answer = harness.submit(range(1, 9), GREEDY, constraint=Counting(20))
    harness.run()
    assert answer.finish is FinishReason.ERROR


def test_forbidden_tokens_leave_a_mask_only_if_others_stay() -> None:
    words = np.full(mask_words(70), -1, np.int32)
    forbid(words, frozenset({31, 32, 69}))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits == 0).tolist() == [31, 32, 69]
    only = np.array([0, 1], np.int32)
    forbid(only, frozenset({32}))
    assert only.tolist() == [0, 1]
