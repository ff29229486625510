"""Which decoding rows begin with the same pages, so that attention can read those once for all of them. No torch.

Rows share a prefix exactly if their page tables begin with the same ids, since every page has one owner: the radix
tree. So the groups come from the page table, whatever the shape of the tree.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from radixserve.engine.step import Int32s, SharedPrefixes
from radixserve.kvcache.manager import CacheManager

_NO_GROUP = -1
_NO_MEMBERS: Int32s = np.zeros(0, np.int32)
_NOTHING_SHARED = SharedPrefixes(_NO_MEMBERS, np.zeros(1, np.int32), _NO_MEMBERS)


class SharedRows:
    """Owns the groups of the rows whose prompt is computed. A row that comes or goes changes only the groups of those
    rows that have its first page; a step without such a change costs a few numpy calls."""

    def __init__(self, cache: CacheManager) -> None:
        num_rows = len(cache.page_table)
        self._cache = cache
        self._first_page: dict[int, int] = {}  # of each row that has pages to share
        self._rows: dict[int, set[int]] = defaultdict(set)  # by their first page
        self._changed: set[int] = set()  # first pages
        self._group_of: Int32s = np.full(num_rows, _NO_GROUP, np.int32)  # a group is named by one of its rows
        self._group_pages: Int32s = np.zeros(num_rows, np.int32)

    def join(self, row: int) -> None:
        """All tokens of ``row`` that others may share are in the prefix cache from now on. Nothing happens if it has
        joined: what it shares with others does not grow by what it generates."""
        if row not in self._first_page and self._cache.cached_pages(row):
            page = self._first_page[row] = int(self._cache.page_table[row, 0])
            self._rows[page].add(row)
            self._changed.add(page)

    def leave(self, row: int) -> None:
        """``row`` is given back; nothing happens if it has not joined."""
        page = self._first_page.pop(row, None)
        if page is None:
            return
        self._group_of[row] = _NO_GROUP
        self._changed.add(page)
        self._rows[page].remove(row)
        if not self._rows[page]:
            del self._rows[page]

    def among(self, decode_rows: Int32s) -> SharedPrefixes:
        """The groups that ``decode_rows`` form."""
        if self._changed:
            self._regroup([row for page in self._changed for row in self._rows.get(page, ())])
            self._changed.clear()
        groups = self._group_of[decode_rows]
        if (groups == _NO_GROUP).all():
            return _NOTHING_SHARED
        sizes = np.bincount(groups[groups != _NO_GROUP], minlength=len(self._group_of))
        shared = np.flatnonzero(sizes > 1)
        order = np.argsort(groups, kind="stable").astype(np.int32)
        members = order[(np.append(sizes, 0) > 1)[groups[order]]]
        starts = np.concatenate([[0], np.cumsum(sizes[shared])]).astype(np.int32)
        return SharedPrefixes(members, starts, self._group_pages[shared])

    def _regroup(self, rows: list[int]) -> None:
        """Find the groups of ``rows``, which share nothing with any other row, anew."""
        self._group_of[rows] = _NO_GROUP
        if len(rows) < 2:
            return
        num_cached = [self._cache.cached_pages(row) for row in rows]
        num_cols = max(num_cached)
        pages = self._cache.page_table[rows, :num_cols]
        for line, count in enumerate(num_cached):
            pages[line, count:] = ~line  # behind its cached pages a row differs from all others
        order = sorted(range(len(rows)), key=[line.tobytes() for line in pages].__getitem__)
        pages = pages[order]  # now rows with a common prefix stand side by side
        differs = pages[1:] != pages[:-1]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), num_cols)
        for positions, num_pages in best_groups(common.tolist()):
            members = [rows[order[position]] for position in positions]
            self._group_of[members] = members[0]
            self._group_pages[members[0]] = num_pages


@dataclass(slots=True)
class _Interval:
    """Sorted rows from ``start`` on that share ``num_pages`` pages; ``saved`` and ``groups`` by those within it."""

    num_pages: int
    start: int
    saved: int = 0
    groups: list[tuple[list[int], int]] = field(default_factory=list)

    def close(self, stop: int) -> None:
        """All rows are known: take them as one group, unless groups within and one of the others save more."""
        within = {row for rows, _ in self.groups for row in rows}
        others = [row for row in range(self.start, stop) if row not in within]
        together = (stop - self.start - 1) * self.num_pages
        apart = self.saved + max(0, len(others) - 1) * self.num_pages
        if together >= apart:
            self.saved, self.groups = together, [(list(range(self.start, stop)), self.num_pages)]
        elif len(others) > 1:
            self.saved = apart
            self.groups.append((others, self.num_pages))


def best_groups(common: Sequence[int]) -> list[tuple[list[int], int]]:
    """Groups (rows, shared pages) of sorted rows of which neighbours i and i+1 share ``common[i]`` pages.

    A group of n rows with p pages saves reading (n - 1) p pages; each row is in one group at most. The nested
    intervals of equal prefixes are found with a stack (Abouelhoda, Kurtz, Ohlebusch 2004) and decided bottom up.
    """
    stack = [_Interval(0, 0)]
    for index, num_pages in enumerate([*common, 0]):
        start, inner = index, None
        while stack[-1].num_pages > num_pages:
            inner = stack.pop()
            inner.close(index + 1)
            start = inner.start
            if stack[-1].num_pages >= num_pages:
                stack[-1].saved += inner.saved
                stack[-1].groups += inner.groups
                inner = None
        if stack[-1].num_pages < num_pages:
            stack.append(_Interval(num_pages, start, inner.saved if inner else 0, inner.groups if inner else []))
    return stack[0].groups
