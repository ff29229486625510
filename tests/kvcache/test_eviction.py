"""Eviction policies: what each prefers, and one contract for all of them."""

import numpy as np
import pytest

from radixserve.kvcache.base import Int32s
from radixserve.kvcache.eviction import EVICTION_ORDERS
from radixserve.kvcache.radix import RadixPrefixCache


def text(group: int, own: int) -> Int32s:
    """Two shared tokens, then two of its own."""
    return np.array([group, group, own, own], np.int32)


def tree_of_three(policy: str, looked_up: list[int]) -> RadixPrefixCache:
    """Texts 0, 1 and 2, on pages 0 to 3, 4 to 7 and 8 to 11, of which some were looked up since."""
    tree = RadixPrefixCache(1, policy)
    for i in range(3):
        tree.insert(text(i, i), np.arange(4 * i, 4 * i + 4, dtype=np.int32))
    for i in looked_up:
        tree.match(text(i, i))
    return tree


def test_lru_gives_up_what_was_looked_up_longest_ago() -> None:
    tree = tree_of_three("lru", [1, 0, 2, 0])
    assert [sorted(tree.evict(4)) for _ in range(3)] == [[4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]]


def test_fifo_ignores_lookups() -> None:
    tree = tree_of_three("fifo", [0])
    assert sorted(tree.evict(4)) == [0, 1, 2, 3]


def test_lfu_keeps_what_is_looked_up_most() -> None:
    tree = tree_of_three("lfu", [0, 0, 1, 2, 2])
    assert sorted(tree.evict(4)) == [4, 5, 6, 7]
    assert sorted(tree.evict(4)) == [0, 1, 2, 3]


def test_lfu_forgets_what_came_once_before_what_comes_often_however_long_ago() -> None:
    tree = tree_of_three("lfu", [0] * 40)
    for i in range(3, 30):
        tree.insert(text(i, i), np.arange(4 * i, 4 * i + 4, dtype=np.int32))
    tree.evict(4 * 29)
    assert sorted(tree.owned_pages()) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", EVICTION_ORDERS)
def test_any_order_gives_up_leaves_only_and_everything_in_the_end(policy: str) -> None:
    tree = RadixPrefixCache(1, policy)
    rng = np.random.default_rng(0)
    held = []
    next_page = 0
    for _ in range(2000):
        tokens = rng.integers(0, 3, rng.integers(1, 9)).astype(np.int32)
        match rng.integers(0, 5):
            case 0 | 1:
                tree.insert(tokens, np.arange(next_page, next_page + len(tokens), dtype=np.int32))
                next_page += len(tokens)
            case 2:
                held.append(tree.match(tokens))
                tree.lock(held[-1])
            case 3 if held:
                tree.unlock(held.pop(rng.integers(0, len(held))))
            case _:
                tree.match(tokens)
                tree.evict(int(rng.integers(0, 4)))
        tree.check_integrity()
    for handle in held:
        tree.unlock(handle)
    owned = sorted(tree.owned_pages())
    assert sorted(tree.clear()) == owned
    assert tree.evictable_pages == len(tree.owned_pages()) == 0
