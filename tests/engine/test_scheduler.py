"""What the scheduler does for single requests and for requests that meet, seen through a checking fake runner."""

import numpy as np
import pytest

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.messages import FinishReason, Submit
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine.fakes import Answer, Harness


def prompt(length: int, first: int = 1) -> list[int]:
    """A text of ``length`` tokens; texts with different ``first`` share no prefix."""
    return [first, *((7 * i + first) % 49 + 1 for i in range(1, length))]


def greedy(max_tokens: int | None = 8, **rules: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True, **rules})  # type: ignore[arg-type]


both_modes = pytest.mark.parametrize("overlap", [False, True])


# ---- lengths ----


@both_modes
@pytest.mark.parametrize(("length", "max_tokens"), [(62, 1), (63, 1), (60, 8), (63, 2), (1, None), (63, None)])
def test_never_more_than_the_context(overlap: bool, length: int, max_tokens: int | None) -> None:
    harness = Harness(max_model_len=64, overlap=overlap)
    answer = harness.submit(prompt(length), greedy(max_tokens))
    harness.run()
    harness.check_outputs()
    room = 64 - length
    assert len(answer.tokens) == (room if max_tokens is None else min(room, max_tokens))
    assert answer.finish is FinishReason.LENGTH


@pytest.mark.parametrize("length", [64, 65, 128])
def test_prompt_that_leaves_no_room_is_rejected_with_both_numbers(length: int) -> None:
    rejected = Harness(max_model_len=64).submit(prompt(length), greedy(1)).rejected
    assert rejected is not None and rejected.code == "context_length_exceeded" and rejected.status == 400
    assert "64" in rejected.message and str(length) in rejected.message


def test_prompt_larger_than_the_pool_is_rejected_with_both_numbers() -> None:
    harness = Harness(num_pages=10, page_size=4, max_model_len=100)
    rejected = harness.submit(prompt(50), greedy(4)).rejected
    assert rejected is not None and rejected.code == "context_length_exceeded"
    assert "40" in rejected.message and "50" in rejected.message


@both_modes
def test_output_that_would_outgrow_the_pool_ends_with_length(overlap: bool) -> None:
    harness = Harness(num_pages=10, page_size=4, max_model_len=100, overlap=overlap)
    large = harness.submit(prompt(30), greedy(60))
    small = [harness.submit(prompt(3, first), greedy(4)) for first in range(2, 7)]
    harness.run()
    harness.check_outputs()
    assert large.finish is FinishReason.LENGTH and len(large.tokens) == 10
    assert all(len(answer.tokens) == 4 for answer in small)


@both_modes
def test_no_step_is_launched_for_a_request_that_surely_ended(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.submit(prompt(5), greedy(3))
    harness.run()
    assert len(harness.runner.plans) == 3


@pytest.mark.parametrize(
    ("ids", "param"), [([], "prompt"), ([1, 50], "prompt"), ([-1], "prompt"), ([2**31 - 1], "prompt")]
)
def test_prompts_that_cannot_be_computed_are_rejected(ids: list[int], param: str) -> None:
    rejected = Harness(vocab_size=50).submit(ids).rejected
    assert rejected is not None and rejected.param == param


def test_token_ids_of_rules_must_exist() -> None:
    harness = Harness(vocab_size=50)
    biased = harness.submit(prompt(3), greedy(logit_bias={50: 1.0})).rejected
    stopped = harness.submit(prompt(3), greedy(stop_token_ids=(99,))).rejected
    assert biased is not None and biased.param == "logit_bias"
    assert stopped is not None and stopped.param == "stop_token_ids"


# ---- stops ----


def _tokens_of(answer_prompt: list[int], count: int) -> list[int]:
    harness = Harness()
    answer = harness.submit(answer_prompt, greedy(count))
    harness.run()
    return answer.tokens


@both_modes
def test_a_stop_id_ends_the_request_and_is_named(overlap: bool) -> None:
    token = _tokens_of(prompt(6), 3)[2]
    harness = Harness(overlap=overlap)
    answer = harness.submit(prompt(6), greedy(100, stop_token_ids=(token,)))
    harness.run()
    harness.check_outputs()
    assert answer.finish is FinishReason.STOP
    assert answer.tokens[-1] == token == answer.events[-1].stop_token_id


@both_modes
def test_stop_ids_wait_for_min_tokens(overlap: bool) -> None:
    token = _tokens_of(prompt(6), 1)[0]
    harness = Harness(overlap=overlap)
    answer = harness.submit(prompt(6), greedy(20, stop_token_ids=(token,), min_tokens=4))
    harness.run()
    harness.check_outputs()
    assert len(answer.tokens) > 4 and token not in answer.tokens[:4]


def test_a_runner_that_samples_a_stop_id_too_early_does_not_end_the_request() -> None:
    token = _tokens_of(prompt(6), 1)[0]
    harness = Harness()
    harness.runner.masks_stops = False
    answer = harness.submit(prompt(6), greedy(20, stop_token_ids=(token,), min_tokens=4))
    harness.run()
    assert answer.tokens[0] == token and len(answer.tokens) > 4


@both_modes
def test_end_of_sequence_ends_unless_ignored(overlap: bool) -> None:
    harness = Harness(overlap=overlap, vocab_size=6)
    texts = [[1 + i % 5, 1 + i // 5] for i in range(12)]
    stopping = [harness.submit(text, greedy(60, ignore_eos=False)) for text in texts]
    ignoring = [harness.submit(text, greedy(60)) for text in texts]
    harness.run()
    harness.check_outputs()
    ends = [answer.events[-1] for answer in stopping if answer.finish is FinishReason.STOP]
    assert len(ends) >= 6 and all(end.token_ids == [0] and end.stop_token_id is None for end in ends)
    assert all(answer.finish is FinishReason.LENGTH for answer in ignoring)


# ---- chunks and the prefix cache ----


@both_modes
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("step_tokens", [16, 64])
def test_cached_prefixes_meet_chunk_borders(overlap: bool, page_size: int, step_tokens: int) -> None:
    harness = Harness(page_size=page_size, num_pages=1024 // page_size, step_tokens=step_tokens, overlap=overlap)
    text = prompt(100)
    for base in (15, 16, 17, 31, 32, 33, 48):
        for more in (0, 1, 2, 15, 16, 17, 32):
            answer = harness.submit(text[: base + more], greedy(4))
            harness.run()
            cached = answer.events[0].cached_tokens
            assert cached % page_size == 0 and cached < base + more
            assert more == 0 or cached >= base // page_size * page_size
    harness.check_outputs()


def test_cached_tokens_are_told_and_counted_once() -> None:
    harness = Harness(page_size=4)
    first = harness.submit(prompt(41), greedy(4))
    harness.run()
    second = harness.submit(prompt(41), greedy(4))
    harness.run()
    assert first.events[0].cached_tokens == 0
    assert [second.events[i].cached_tokens for i in (0, -1)] == [40, 40]
    stats = harness.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (82, 40, 8)


def test_namespaces_share_nothing() -> None:
    harness = Harness()
    for namespace, cached in (("a", 0), ("a", 40), ("b", 0), ("", 0), ("", 40)):
        answer = harness.submit(prompt(41), greedy(2), namespace=namespace)
        harness.run()
        assert answer.events[0].cached_tokens == cached


@both_modes
def test_identical_prompts_are_computed_once(overlap: bool) -> None:
    harness = Harness(step_tokens=32, overlap=overlap)
    answers = [harness.submit(prompt(121), SamplingParams(seed=i, max_tokens=8)) for i in range(6)]
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().cached_tokens == 5 * 120
    assert len({tuple(answer.tokens) for answer in answers}) > 1


@both_modes
def test_a_common_prefix_is_computed_once_and_not_waited_for_longer(overlap: bool) -> None:
    """The others start when the prefix is there, not when the first request has its own long rest."""
    harness = Harness(step_tokens=32, num_pages=1024, overlap=overlap)
    leader = harness.submit(prompt(64) + [9] * 400, greedy(2))
    others = [harness.submit(prompt(64) + [10 + i] * 8, greedy(2)) for i in range(8)]
    harness.run()
    assert all(answer.events[0].cached_tokens == 64 for answer in others)
    assert max(answer.times[0] for answer in others) < leader.times[0]


@both_modes
@pytest.mark.parametrize("aborted_after", [1, 2, 3])
def test_who_waits_for_a_prefix_goes_on_when_the_first_is_aborted(overlap: bool, aborted_after: int) -> None:
    harness = Harness(step_tokens=32, overlap=overlap)
    for _ in range(5):
        harness.submit(prompt(200), greedy(4))
    for _ in range(aborted_after):
        harness.advance()
    harness.scheduler.abort(b"f", 0)
    harness.run()
    harness.check_outputs()
    assert [answer.finish for answer in harness.answers.values()] == [FinishReason.ABORT, *[FinishReason.LENGTH] * 4]


def test_the_naive_cache_makes_nobody_wait() -> None:
    harness = Harness(step_tokens=64, radix=False)
    answers = [harness.submit(prompt(20), greedy(2)) for _ in range(3)]
    harness.run()
    harness.check_outputs()
    assert [answer.times[0] for answer in answers] == [2, 2, 2]  # one step of prefill, read one step later


@both_modes
def test_prompt_logprobs_cover_every_prompt_token_whatever_is_cached(overlap: bool) -> None:
    harness = Harness(step_tokens=16, overlap=overlap)
    harness.submit(prompt(50), greedy(2))
    harness.run()
    answer = harness.submit(prompt(50), greedy(4, prompt_logprobs=0, logprobs=0))
    harness.run()
    harness.check_outputs()
    entries = answer.events[0].prompt_logprobs
    assert entries is not None and entries[0] is None
    assert [entry.token_id for entry in entries[1:] if entry] == prompt(50)[1:]
    assert answer.events[0].cached_tokens == 0
    assert [event.logprobs[0].token_id for event in answer.events if event.logprobs] == answer.tokens
    assert all(event.prompt_logprobs is None for event in answer.events[1:])


# ---- retraction ----


@both_modes
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("radix", [True, False])
def test_two_requests_that_do_not_fit_together_both_finish(overlap: bool, page_size: int, radix: bool) -> None:
    harness = Harness(page_size=page_size, num_pages=256 // page_size, max_model_len=256, overlap=overlap, radix=radix)
    harness.submit(prompt(20, 1), greedy(200))
    harness.submit(prompt(20, 2), SamplingParams(seed=3, max_tokens=200, ignore_eos=True, logprobs=0))
    harness.run()
    harness.check_outputs()
    stats = harness.scheduler.stats()
    assert stats.retracted >= 1
    assert stats.prompt_tokens == 40, "a prompt counts once, however often it is computed"
    assert all({event.cached_tokens for event in answer.events} == {0} for answer in harness.answers.values())


@both_modes
def test_the_youngest_steps_back_and_the_oldest_never_does(overlap: bool) -> None:
    harness = Harness(page_size=4, num_pages=100, max_model_len=400, overlap=overlap)
    answers = [harness.submit(prompt(10, first), greedy(250)) for first in range(1, 5)]
    harness.run()
    harness.check_outputs()
    ends = [answer.times[-1] for answer in answers]
    assert ends == sorted(ends)
    gaps = np.diff(answers[0].times)
    assert gaps.max() <= 2, "the oldest waits for the others to step back, once at a time"


def test_retracted_prompt_logprobs_are_whole() -> None:
    harness = Harness(page_size=4, num_pages=64, max_model_len=256, step_tokens=8)
    old = [harness.submit(prompt(4, first), greedy(100)) for first in (1, 2)]
    for _ in range(40):
        harness.advance()
    young = harness.submit(prompt(120, 3), greedy(2, prompt_logprobs=0))
    harness.run()
    harness.check_outputs()
    entries = young.events[0].prompt_logprobs
    assert entries is not None and [entry and entry.token_id for entry in entries] == [None, *prompt(120, 3)[1:]]
    assert all(len(answer.tokens) == 100 for answer in old)


# ---- aborts and failures ----


@both_modes
@pytest.mark.parametrize("steps", range(8))
def test_abort_in_every_state_gives_one_final_event_and_all_pages_back(overlap: bool, steps: int) -> None:
    """Queued (0), in the middle of chunks (1 to 3), decoding (4, 5), over (6, 7)."""
    harness = Harness(step_tokens=32, overlap=overlap)
    answer = harness.submit(prompt(120), greedy(3))
    for _ in range(steps):
        harness.advance()
    harness.scheduler.abort(b"f", 0)
    harness.scheduler.abort(b"f", 0)
    harness.scheduler.abort(b"f", 77)
    harness.scheduler.abort(b"other", 0)
    harness.collect()
    harness.run()
    assert answer.finish is (FinishReason.LENGTH if steps >= 7 or (steps == 6 and not overlap) else FinishReason.ABORT)
    assert answer.tokens == _tokens_of(prompt(120), 3)[: len(answer.tokens)]


def test_abort_by_request_id_takes_all_of_that_id_and_no_other() -> None:
    harness = Harness()
    for frontend in (b"f", b"g"):
        for uid, name in enumerate(("x", "x", "y")):
            harness.submit(prompt(5, uid + 1), greedy(50), uid=uid, frontend=frontend, request_id=name)
    harness.advance()
    harness.scheduler.abort_request("x")
    harness.run()
    finishes = {key: answer.finish for key, answer in harness.answers.items()}
    aborted = {key for key, finish in finishes.items() if finish is FinishReason.ABORT}
    assert aborted == {(b"f", 0), (b"f", 1), (b"g", 0), (b"g", 1)}


def test_abort_of_all() -> None:
    harness = Harness()
    answers = [harness.submit(prompt(5, 1 + i), greedy(50)) for i in range(30)]
    harness.advance()
    harness.scheduler.abort_request("")
    harness.run()
    assert all(answer.finish is FinishReason.ABORT for answer in answers)


def test_a_dead_frontend_loses_its_requests_only() -> None:
    harness = Harness()
    survivor = harness.submit(prompt(5), greedy(20), frontend=b"f")
    for uid in range(5):
        submit = Submit(uid, "", np.array(prompt(8, uid + 2), "<i4").tobytes(), greedy(500))
        assert harness.scheduler.submit(b"dead", submit) is None
    harness.pipeline.advance()
    harness.scheduler.forget_frontend(b"dead")
    assert b"dead" not in harness.scheduler.take_outputs()
    while harness.advance():
        pass
    assert survivor.finish is FinishReason.LENGTH
    assert harness.scheduler.stats().aborted == 5 and not harness.scheduler.requests


@both_modes
@pytest.mark.parametrize("broken_step", [1, 2, 3, 6])
def test_a_step_that_raises_ends_its_requests_and_no_others(overlap: bool, broken_step: int) -> None:
    harness = Harness(step_tokens=32, overlap=overlap, options=SchedulerOptions(max_num_seqs=2))
    harness.runner.broken_steps = {broken_step}
    answers = [harness.submit(prompt(40, 1 + i), greedy(6)) for i in range(5)]
    harness.run()
    harness.check_outputs()
    failed = [answer for answer in answers if answer.finish is FinishReason.ERROR]
    assert 1 <= len(failed) <= 2
    assert all("the engine failed while it computed" in (answer.events[-1].error or "") for answer in failed)
    assert all(answer.finish is FinishReason.LENGTH for answer in answers if answer not in failed)


def test_a_device_that_keeps_failing_is_given_up() -> None:
    harness = Harness(options=SchedulerOptions(max_num_seqs=1))
    harness.runner.broken_steps = set(range(3, 100))
    for i in range(8):
        harness.submit(prompt(10, 1 + i), greedy(2))
    with pytest.raises(RuntimeError, match="the device lost step"):
        harness.run()


@both_modes
def test_output_that_is_not_finite_fails_one_request_alone(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.runner.broken_seeds = {7}
    answers = [harness.submit(prompt(20), SamplingParams(seed=i, max_tokens=5, ignore_eos=True)) for i in (6, 7, 8)]
    harness.run()
    harness.check_outputs()
    assert [answer.finish for answer in answers] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert answers[1].tokens == [] and "not finite" in (answers[1].events[0].error or "")


def test_what_was_not_finite_is_not_cached() -> None:
    harness = Harness()
    harness.runner.broken_seeds = {7}
    harness.submit(prompt(20), SamplingParams(seed=7))
    harness.run()
    answer = harness.submit(prompt(20))
    harness.run()
    assert answer.events[0].cached_tokens == 0


# ---- the line ----


def test_a_full_queue_refuses_and_free_seats_do_not_count() -> None:
    harness = Harness(options=SchedulerOptions(max_num_seqs=2, max_num_queued_reqs=3))
    answers = [harness.submit(prompt(4, 1 + i), greedy(5)) for i in range(8)]
    rejected = [answer.rejected for answer in answers if answer.rejected]
    assert len(rejected) == 3 and all(answer.rejected is None for answer in answers[:5])
    assert {(r.status, r.code) for r in rejected} == {(429, "queue_full")}
    assert all(r.retry_after_s for r in rejected)
    harness.run()
    harness.check_outputs()


def test_a_queue_full_of_tokens_refuses_but_for_a_single_request() -> None:
    harness = Harness(options=SchedulerOptions(max_num_seqs=1, max_num_queued_tokens=100))
    answers = [harness.submit(prompt(size, 1 + i), greedy(5)) for i, size in enumerate([200, 4, 100, 4])]
    assert [answer.rejected and answer.rejected.code for answer in answers] == [None, *["queue_full"] * 3]
    harness.run()
    harness.check_outputs()


def test_a_request_that_waits_too_long_is_told_so_and_one_that_has_begun_is_not() -> None:
    now = [1000.0]
    options = SchedulerOptions(max_num_seqs=1, max_queue_time=60)
    harness = Harness(options=options, clock=lambda: now[0])
    begun, waiting = harness.submit(prompt(4), greedy(20)), harness.submit(prompt(4, 2), greedy(5))
    harness.advance()
    now[0] += 59
    late = harness.submit(prompt(4, 3), greedy(5))
    assert harness.scheduler.expire() == []
    now[0] += 2
    ((frontend, rejected),) = harness.scheduler.expire()
    assert (frontend, rejected.uid, rejected.status, rejected.code) == (b"f", 1, 503, "queue_timeout")
    waiting.rejected = rejected
    harness.run()
    assert begun.finish is late.finish is FinishReason.LENGTH
    harness.check_outputs()


def test_a_uid_in_use_is_refused() -> None:
    harness = Harness()
    first = harness.submit(prompt(4), uid=5)
    again = harness.scheduler.submit(b"f", Submit(5, "", np.array([1], "<i4").tobytes(), greedy(1)))
    assert again is not None and again.code == "duplicate_uid"
    harness.answers[b"f", 6] = Answer([], greedy(1), rejected=again)
    harness.run()
    assert first.finish is FinishReason.LENGTH


def test_fcfs_starts_in_the_order_of_arrival() -> None:
    harness = Harness(options=SchedulerOptions(max_num_seqs=1))
    answers = [harness.submit(prompt(4, 1 + i), greedy(2)) for i in range(5)]
    harness.run()
    assert [a.times[0] for a in answers] == sorted(a.times[0] for a in answers)


def test_priority_starts_the_lowest_number_first() -> None:
    harness = Harness(options=SchedulerOptions(max_num_seqs=1, schedule_policy="priority"))
    answers = {p: harness.submit(prompt(4, 1 + p), greedy(2), priority=p) for p in (3, 1, 2, 0)}
    harness.run()
    assert sorted(answers, key=lambda p: answers[p].times[0]) == [0, 1, 2, 3]


def test_lpm_prefers_cached_prefixes_but_not_for_ever() -> None:
    harness = Harness(num_pages=1024, options=SchedulerOptions(max_num_seqs=1, schedule_policy="lpm"))
    harness.submit(prompt(41), greedy(1))
    harness.run()
    cold = harness.submit(prompt(41, 2), greedy(1))
    warm = [harness.submit([*prompt(40), 1 + i % 40, 3], greedy(1)) for i in range(60)]
    harness.run()
    harness.check_outputs()
    before = [answer for answer in warm if answer.times[0] < cold.times[0]]
    assert len(before) == 32, "overtaken, but only so often"


def test_flush_forgets_what_nobody_holds() -> None:
    harness = Harness()
    harness.submit(prompt(41), greedy(1))
    harness.run()
    assert harness.scheduler.flush_cache() == 40
    answer = harness.submit(prompt(41), greedy(1))
    harness.run()
    assert answer.events[0].cached_tokens == 0
