"""The radix tree by itself: what it finds, what it protects, what it gives up."""

import numpy as np
import pytest

from radixserve.kvcache.base import Int32s
from radixserve.kvcache.radix import RadixPrefixCache

ALL = 10**6
page_sizes = pytest.mark.parametrize("page_size", [1, 4, 16])


def ids(*spans: tuple[int, int]) -> Int32s:
    """Token ids first..last of each span, both included."""
    return np.concatenate([np.arange(first, last + 1, dtype=np.int32) for first, last in spans])


def pages(first: int, count: int) -> Int32s:
    return np.arange(first, first + count, dtype=np.int32)


def sizes(tree: RadixPrefixCache) -> tuple[int, int]:
    """Pages that are evictable and protected."""
    return tree.evictable_pages, len(tree.owned_pages()) - tree.evictable_pages


def add(tree: RadixPrefixCache, tokens: Int32s, first_page: int, namespace: str = "") -> int:
    """Insert on fresh pages; returns the tokens that were there already."""
    return tree.insert(tokens, pages(first_page, len(tokens) // tree.page_size), namespace).already_there


def found(tree: RadixPrefixCache, tokens: Int32s, namespace: str = "") -> list[int]:
    """The pages that a request for ``tokens`` would be served from."""
    handle = tree.match(tokens, namespace)
    tree.lock(handle)
    result = tree.pages(handle).tolist()
    tree.unlock(handle)
    return result


@page_sizes
def test_an_inserted_prefix_is_found_on_its_pages_in_whole_pages(page_size: int) -> None:
    tree = RadixPrefixCache(page_size)
    add(tree, ids((1, 64)), first_page=100)
    assert found(tree, ids((1, 64))) == pages(100, 64 // page_size).tolist()
    assert tree.match(ids((1, 40), (900, 910))).cached_len == 40 // page_size * page_size
    assert tree.match(ids((1, 63))).cached_len == 63 // page_size * page_size
    assert tree.match(ids((2, 64))).cached_len == 0
    assert tree.match(ids((1, 200))).cached_len == 64


def test_a_difference_inside_a_page_loses_that_page() -> None:
    tree = RadixPrefixCache(4)
    add(tree, ids((1, 12)), first_page=0)
    assert tree.match(ids((1, 11), (99, 99))).cached_len == 8
    assert tree.match(ids((1, 3), (99, 107))).cached_len == 0
    assert add(tree, ids((1, 7), (99, 99)), first_page=10) == 4
    assert found(tree, ids((1, 12))) == [0, 1, 2]
    assert found(tree, ids((1, 7), (99, 99))) == [0, 11]
    tree.check_integrity()


def test_a_prompt_shorter_than_a_page_is_neither_kept_nor_found() -> None:
    tree = RadixPrefixCache(16)
    assert add(tree, ids((1, 15)), first_page=0) == 0
    assert sizes(tree) == (0, 0)
    assert tree.match(ids((1, 15))).cached_len == 0
    assert found(tree, np.empty(0, np.int32)) == []


@page_sizes
def test_a_split_leaves_both_halves_locked(page_size: int) -> None:
    tree = RadixPrefixCache(page_size)
    total = 64 // page_size
    text_a = ids((1, 64))
    text_b = ids((1, 32), (101, 132))
    text_c = ids((1, 16), (201, 216))
    add(tree, text_a, first_page=0)
    handle = tree.match(text_a)
    tree.lock(handle)
    assert add(tree, text_b, first_page=100) == 32
    assert tree.match(text_c).cached_len == 16
    assert add(tree, text_c, first_page=200) == 16
    tree.check_integrity()

    freed = tree.evict(ALL)

    own_b = pages(100, total)[32 // page_size :]
    own_c = pages(200, 32 // page_size)[16 // page_size :]
    assert sorted(freed) == [*own_b, *own_c]
    assert sizes(tree) == (0, total)
    assert tree.pages(handle).tolist() == pages(0, total).tolist()
    assert found(tree, text_a) == pages(0, total).tolist()
    assert tree.match(text_b).cached_len == 32
    assert tree.match(text_c).cached_len == 16

    tree.unlock(handle)
    assert sorted(tree.evict(ALL)) == pages(0, total).tolist()
    assert sizes(tree) == (0, 0)
    tree.check_integrity()


def test_a_lock_held_twice_needs_two_unlocks() -> None:
    tree = RadixPrefixCache(1)
    add(tree, ids((1, 8)), first_page=0)
    whole, half = tree.match(ids((1, 8))), tree.match(ids((1, 4)))
    tree.lock(whole)
    tree.lock(half)
    tree.unlock(whole)
    assert tree.evict(ALL).tolist() == [4, 5, 6, 7]
    tree.unlock(half)
    assert tree.evict(ALL).tolist() == [0, 1, 2, 3]


def test_inserting_known_text_changes_no_page_and_says_so() -> None:
    tree = RadixPrefixCache(16)
    text = ids((1, 512))
    assert add(tree, text, first_page=0) == 0
    again = tree.insert(text, pages(500, 32))
    assert again.already_there == 512
    tree.lock(again.handle)
    assert tree.pages(again.handle).tolist() == pages(0, 32).tolist()
    assert sizes(tree) == (0, 32)


def test_the_tree_keeps_its_own_copy_of_what_is_inserted() -> None:
    tree = RadixPrefixCache(1)
    tokens, row = ids((1, 8)), pages(0, 8)
    tree.insert(tokens, row)
    tokens[:] = 0
    row[:] = 99
    assert found(tree, ids((1, 8))) == list(range(8))


def test_least_recently_used_text_goes_first_and_a_lookup_counts_as_use() -> None:
    tree = RadixPrefixCache(4)
    for i in range(3):
        add(tree, ids((100 * i, 100 * i + 7)), first_page=10 * i)
    tree.match(ids((0, 7)))
    assert sorted(tree.evict(2)) == [10, 11]
    assert sorted(tree.evict(2)) == [20, 21]
    assert sorted(tree.evict(2)) == [0, 1]


def test_looking_without_touching_changes_no_order() -> None:
    tree = RadixPrefixCache(1)
    add(tree, ids((1, 4)), first_page=0)
    add(tree, ids((11, 14)), first_page=10)
    assert tree.cached_len(ids((1, 3))) == 3
    assert sorted(tree.evict(4)) == [0, 1, 2, 3]


def test_a_leaf_loses_only_as_much_as_is_asked_from_its_end() -> None:
    tree = RadixPrefixCache(4)
    add(tree, ids((1, 40)), first_page=0)
    assert tree.evict(3).tolist() == [7, 8, 9]
    assert tree.match(ids((1, 40))).cached_len == 28
    assert tree.evict(1).tolist() == [6]
    assert add(tree, ids((1, 40)), first_page=20) == 24
    assert found(tree, ids((1, 40))) == [0, 1, 2, 3, 4, 5, 26, 27, 28, 29]
    tree.check_integrity()


def test_a_shared_prefix_outlives_the_texts_that_use_it() -> None:
    tree = RadixPrefixCache(1)
    for i in range(5):
        add(tree, ids((1, 10), (100 + 10 * i, 105 + 10 * i)), first_page=100 * i)
    assert len(tree.evict(30)) == 30
    assert tree.match(ids((1, 10))).cached_len == 10


def test_evicting_more_than_there_is_gives_what_there_is() -> None:
    tree = RadixPrefixCache(1)
    assert tree.evict(5).tolist() == []
    add(tree, ids((1, 3)), first_page=0)
    assert tree.evict(0).tolist() == []
    assert sorted(tree.evict(5)) == [0, 1, 2]


@page_sizes
def test_an_evicted_text_is_never_found_again_on_its_old_pages(page_size: int) -> None:
    tree = RadixPrefixCache(page_size)
    text = ids((1, 64))
    for round_ in range(5):
        add(tree, text, first_page=100 * round_)
        assert found(tree, text) == pages(100 * round_, 64 // page_size).tolist()
        tree.evict(ALL)
        assert tree.match(text).cached_len == 0
        add(tree, ids((501, 564)), first_page=100 * round_)
        assert tree.match(text).cached_len == 0
        tree.clear()


@page_sizes
def test_namespaces_share_nothing(page_size: int) -> None:
    tree = RadixPrefixCache(page_size)
    text = ids((1, 64))
    add(tree, text, first_page=0, namespace="aaa")
    assert tree.match(text, "bbb").cached_len == tree.match(text).cached_len == 0
    add(tree, text, first_page=100)
    assert found(tree, text, "aaa")[0] == 0
    assert found(tree, text)[0] == 100
    tree.check_integrity()


def test_a_namespace_that_looks_like_tokens_is_still_only_a_namespace() -> None:
    tree = RadixPrefixCache(1)
    add(tree, np.frombuffer(b"abcd", np.int32), first_page=0)
    assert tree.match(np.empty(0, np.int32), "abcd").cached_len == 0
    assert tree.match(np.frombuffer(b"efgh", np.int32), "abcd").cached_len == 0


def test_locking_a_handle_whose_text_was_evicted_is_caught() -> None:
    tree = RadixPrefixCache(1)
    add(tree, ids((1, 3)), first_page=0)
    handle = tree.match(ids((1, 3)))
    tree.clear()
    with pytest.raises(AssertionError, match="evicted before it was locked"):
        tree.lock(handle)


def test_unlocking_more_often_than_locking_is_caught() -> None:
    tree = RadixPrefixCache(1)
    add(tree, ids((1, 3)), first_page=0)
    with pytest.raises(AssertionError, match="unlocked more often"):
        tree.unlock(tree.match(ids((1, 3))))


def test_a_page_in_two_places_is_caught() -> None:
    tree = RadixPrefixCache(1)
    add(tree, ids((1, 3)), first_page=0)
    add(tree, ids((11, 13)), first_page=2)
    with pytest.raises(AssertionError, match="two places"):
        tree.check_integrity()
