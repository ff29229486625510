"""Requests that share a prefix compute it once, and plans tell which decode rows begin with the same pages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.sharing import best_groups
from radixserve.tests.engine.fakes import Answer, Harness

_GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def groups_of_prompts(groups: int, size: int, prefix: int, own: int) -> list[list[int]]:
    """Shuffled prompts of ``groups`` prefixes, ``size`` of each with ``own`` tokens of their own."""
    rng = random.Random(0)
    prompts = []
    for _ in range(groups):
        shared = [rng.randrange(10_000) for _ in range(prefix)]
        prompts += [[*shared, *(rng.randrange(10_000) for _ in range(own))] for _ in range(size)]
    rng.shuffle(prompts)
    return prompts


def shared_prompts_harness(max_num_seqs: int, step_tokens: int, overlap: bool) -> Harness:
    options = SchedulerOptions(max_num_seqs=max_num_seqs)
    harness = Harness(
        page_size=16, num_pages=8000, vocab_size=10_000, step_tokens=step_tokens, overlap=overlap, options=options
    )
    harness.scheduler.check_integrity = lambda: None  # type: ignore[method-assign]  # long runs: at the end is enough
    return harness


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("max_num_seqs", "step_tokens"), [(16, 24), (16, 64), (64, 150), (256, 512), (256, 4096)])
def test_a_prefix_that_many_share_is_computed_once(max_num_seqs: int, step_tokens: int, overlap: bool) -> None:
    """16 prefixes of 128 tokens, shuffled, all requests at once; chunks shorter and longer than the prefix."""
    harness = shared_prompts_harness(max_num_seqs, step_tokens, overlap)
    for prompt in groups_of_prompts(groups=16, size=16, prefix=128, own=8):
        harness.submit(prompt, _GREEDY)
    harness.run()
    harness.check_outputs()
    computed = sum(len(chunk.token_ids) for plan in harness.runner.plans for chunk in plan.chunks)
    assert harness.scheduler.stats().cached_tokens == 16 * 15 * 128
    assert computed == 16 * 128 + 16 * 16 * 8


def decoding(harness: Harness, prompts: list[list[int]]) -> list[Answer]:
    answers = [harness.submit(prompt, SamplingParams(max_tokens=100, ignore_eos=True)) for prompt in prompts]
    for _ in range(8):
        harness.advance()
    return answers


def told(harness: Harness) -> list[tuple[list[int], int]]:
    """Groups of the last plan: rows and shared pages, largest first."""
    plan = harness.runner.plans[-1]
    shared = plan.shared
    assert shared is not None
    groups = []
    for group, num_pages in enumerate(shared.num_pages.tolist()):
        members = shared.members[shared.starts[group] : shared.starts[group + 1]]
        groups.append((sorted(plan.decode_rows[members].tolist()), num_pages))
    return sorted(groups, key=lambda group: -len(group[0]))


def test_groups_follow_who_comes_and_goes() -> None:
    harness = shared_prompts_harness(16, 4096, overlap=True)
    a, b = list(range(64)), list(range(100, 140))
    answers = decoding(harness, [[*a, 1], [*a, 2], [*a, 3], [*b, 1], [*b, 2], [7, 8, 9]])
    assert [(len(rows), num_pages) for rows, num_pages in told(harness)] == [(3, 4), (2, 2)]
    decoding(harness, [[*b, 5]])
    assert [(len(rows), num_pages) for rows, num_pages in told(harness)] == [(3, 4), (3, 2)]
    for answer in (answers[0], answers[1]):
        harness.scheduler.abort(b"f", answers.index(answer))
    harness.advance()
    harness.advance()
    assert [(len(rows), num_pages) for rows, num_pages in told(harness)] == [(3, 2)]
    harness.run()


def test_a_longer_prefix_of_a_few_and_a_shorter_one_of_all_make_two_groups() -> None:
    harness = shared_prompts_harness(16, 4096, overlap=True)
    system, document = list(range(32)), list(range(200, 360))
    decoding(harness, [[*system, *document, i] for i in range(3)] + [[*system, 500 + i] for i in range(5)])
    assert [(len(rows), num_pages) for rows, num_pages in told(harness)] == [(5, 2), (3, 12)]


def test_nothing_is_shared_without_a_prefix_cache() -> None:
    harness = Harness(page_size=4, radix=False)
    decoding(harness, [list(range(40))] * 3)
    assert told(harness) == []


@settings(max_examples=200)
@given(st.lists(st.integers(0, 4), max_size=7))
def test_groups_are_disjoint_and_save_no_less_than_any_one_level(common: list[int]) -> None:
    groups = best_groups(common)
    members = [row for rows, _ in groups for row in rows]
    assert len(members) == len(set(members))
    for rows, num_pages in groups:
        assert len(rows) > 1 and num_pages == min(common[min(rows) : max(rows)])
    saved = sum((len(rows) - 1) * num_pages for rows, num_pages in groups)
    for level in range(1, 5):  # all runs of neighbours that share so many pages
        runs = "".join("1" if pages >= level else " " for pages in common).split()
        assert saved >= level * sum(map(len, runs))
