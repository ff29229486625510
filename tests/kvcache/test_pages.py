"""The pool of free pages."""

import numpy as np
import pytest

from radixserve.kvcache.pages import PagePool


def test_every_page_is_handed_out_once() -> None:
    pool = PagePool(10)
    taken = np.concatenate([pool.alloc(3), pool.alloc(0), pool.alloc(7)])
    assert sorted(taken) == list(range(10))
    assert pool.num_free == 0


def test_freed_pages_are_used_again_before_untouched_ones() -> None:
    pool = PagePool(10)
    first = pool.alloc(4)
    pool.free(first)
    assert sorted(pool.alloc(4)) == sorted(first)


def test_a_page_handed_out_does_not_change_when_others_come_back() -> None:
    pool = PagePool(4)
    kept, other = pool.alloc(2), pool.alloc(2)
    before = kept.copy()
    pool.free(other)
    assert kept.tolist() == before.tolist()


def test_a_page_freed_twice_is_caught() -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages[:1])


def test_a_page_named_twice_in_one_free_is_caught_by_the_check() -> None:
    pool = PagePool(4)
    page = pool.alloc(2)[0]
    pool.free(np.array([page, page], np.int32))
    with pytest.raises(AssertionError):
        pool.free_pages()


def test_asking_for_more_than_is_free_is_caught() -> None:
    with pytest.raises(AssertionError, match="more pages asked"):
        PagePool(2).alloc(3)
