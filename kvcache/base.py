"""The prefix-cache interface: from token ids to pages, no KV and no torch in it.

Lengths are tokens and always whole pages; ``pages`` are int32 page ids, one for each ``page_size`` tokens.
Requests of different ``namespace`` share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Handle:
    """A matched prefix: ``cached_len`` tokens that end at ``node``. Valid while locked, or until the next eviction."""

    cached_len: int
    node: Any


@dataclass(frozen=True, slots=True)
class InsertResult:
    """``handle`` ends at the inserted text; the first ``already_there`` tokens were in the tree before, on pages of
    the tree's own: the caller still owns its duplicates of those and frees or swaps them."""

    handle: Handle
    already_there: int


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Pages of the tree: ``evictable`` by eviction now, ``protected`` by a lock on them or below them."""

    evictable: int
    protected: int


class PrefixCache(Protocol):
    """Maps token prefixes to pages. A handle must be locked before its pages are used."""

    page_size: int

    def match(self, token_ids: Int32s, namespace: str = "") -> Handle:
        """Longest cached prefix in whole pages; marks it as used. Splits a node when the match ends inside it."""
        ...

    def lock(self, handle: Handle) -> None:
        """Protect the prefix up to the root from eviction; counts, so lock and unlock pair up."""
        ...

    def unlock(self, handle: Handle) -> None: ...

    def pages(self, handle: Handle) -> Int32s:
        """The page ids of a locked handle, [cached_len / page_size]."""
        ...

    def insert(self, token_ids: Int32s, pages: Int32s, namespace: str = "") -> InsertResult:
        """Add whole pages; the tree owns ``pages[already_there / page_size:]`` from now on."""
        ...

    def evict(self, num_pages: int) -> Int32s:
        """Give up at least ``num_pages`` unprotected pages if there are as many, least valuable leaves first."""
        ...

    def sizes(self) -> CacheSizes: ...

    def clear(self) -> Int32s:
        """Evict all that is not protected."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError on any broken invariant of the structure."""
        ...
