"""The pages that hold nothing."""

import numpy as np
from numpy.typing import NDArray

from radixserve.kvcache.base import Int32s


class PagePool:
    """Owns the free page ids ``0 .. num_pages`` on a stack; hands out each id at most once until it comes back."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._stack = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self._num_free = num_pages
        self._is_free: NDArray[np.bool_] = np.ones(num_pages, np.bool_)

    @property
    def num_free(self) -> int:
        """Pages that ``alloc`` can give now."""
        return self._num_free

    def alloc(self, count: int) -> Int32s:
        """Take ``count`` pages, last freed first. The caller has made sure that there are as many."""
        assert count <= self._num_free, "more pages asked than are free"
        self._num_free -= count
        pages = self._stack[self._num_free : self._num_free + count][::-1].copy()
        assert self._is_free[pages].all(), "a free page is in use"
        self._is_free[pages] = False
        return pages

    def free(self, pages: Int32s) -> None:
        """Give ``pages`` back. AssertionError if one is free already."""
        assert not self._is_free[pages].any(), "a page was freed twice"
        self._is_free[pages] = True
        self._stack[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def free_pages(self) -> Int32s:
        """The free page ids, for checks."""
        assert int(self._is_free.sum()) == self._num_free
        return self._stack[: self._num_free].copy()
