"""How prompts share the budget of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixserve.engine.planner import decode_limit, share_budget


@pytest.mark.parametrize(
    ("unfinished", "budget", "shares"),
    [
        ([], 8, []),
        ([100], 8, [8]),
        ([3], 8, [3]),
        ([100, 2], 8, [6, 2]),  # what the short one leaves goes to the oldest
        ([100, 50, 3], 8, [4, 1, 3]),  # the oldest has half, the shortest comes next
        ([100, 50, 50], 8, [4, 4, 0]),  # equal ones: the older first
        ([2, 50, 3], 8, [2, 3, 3]),
        ([5, 5], 1, [1, 0]),
    ],
)
def test_oldest_gets_half_and_short_ones_go_first(unfinished: list[int], budget: int, shares: list[int]) -> None:
    assert share_budget(unfinished, budget) == shares


@given(st.lists(st.integers(1, 300), max_size=12), st.integers(1, 400))
def test_shares_use_the_budget_and_no_more(unfinished: list[int], budget: int) -> None:
    shares = share_budget(unfinished, budget)
    assert all(0 <= share <= need for share, need in zip(shares, unfinished, strict=True))
    assert sum(shares) == min(budget, sum(unfinished))
    if unfinished:
        assert shares[0] >= min(unfinished[0], (budget + 1) // 2)


@given(st.integers(1, 1024), st.integers(1, 10_000))
def test_a_prompt_beside_decodes_always_gets_a_share(max_num_seqs: int, step_tokens: int) -> None:
    limit = decode_limit(max_num_seqs, step_tokens)
    assert 1 <= limit <= max_num_seqs
    others = limit - 1  # the prompt needs one of the seats itself
    assert step_tokens - others >= max(1, step_tokens // 4)
