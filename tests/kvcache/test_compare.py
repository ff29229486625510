"""Common prefixes of token sequences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixserve.kvcache.compare import common_pages, common_prefix_len

tokens = st.lists(st.integers(0, 2), max_size=40)


def counted_one_by_one(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@given(shared=tokens, a=tokens, b=tokens)
def test_the_common_prefix_ends_at_the_first_difference(shared: list[int], a: list[int], b: list[int]) -> None:
    a, b = shared + a, shared + b
    assert common_prefix_len(np.array(a, np.int32), np.array(b, np.int32)) == counted_one_by_one(a, b)


@pytest.mark.parametrize("page_size", [1, 4])
@given(before=tokens, shared=tokens, a=tokens, b=tokens)
def test_common_pages_are_the_whole_pages_of_the_common_prefix(
    page_size: int, before: list[int], shared: list[int], a: list[int], b: list[int]
) -> None:
    text, other = np.array(before + shared + a, np.int32).tobytes(), np.array(shared + b, np.int32).tobytes()
    expected = counted_one_by_one(shared + a, shared + b) // page_size
    assert common_pages(text, 4 * len(before), memoryview(other), 4 * page_size) == expected
