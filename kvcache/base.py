"""The prefix-cache interface: from token ids to pages, no KV and no torch in it.

Lengths are tokens and always whole pages; ``pages`` are int32 page ids, one for each ``page_size`` tokens.
Requests of different ``namespace`` share nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from radixserve.kvcache.watch import TreeWatch

Int32s = NDArray[np.int32]
NOTHING: Int32s = np.empty(0, np.int32)  # no pages, no tokens


class Handle(NamedTuple):
    """A matched prefix: ``cached_len`` tokens that end at ``node``. Valid while locked, or until the next eviction."""

    cached_len: int
    node: Any


class InsertResult(NamedTuple):
    """``handle`` ends at what is cached of the inserted text; its first ``already_there`` tokens were in the tree
    before, on pages of the tree's own: the caller still owns its duplicates of those and frees or swaps them. The tree
    took over the pages of ``[already_there, handle.cached_len)``; those behind stay the caller's."""

    handle: Handle
    already_there: int


class CacheSizes(NamedTuple):
    """Pages of the tree: ``evictable`` by eviction now, ``protected`` by a lock on them or below them."""

    evictable: int
    protected: int


class PrefixCache(Protocol):
    """Maps token prefixes to pages. A handle must be locked before its pages are used."""

    page_size: int

    def match(self, token_ids: Int32s, namespace: str = "") -> Handle:
        """Longest cached prefix in whole pages; marks it as used. Splits a node when the match ends inside it."""
        ...

    def cached_len(self, token_ids: Int32s, namespace: str = "") -> int:
        """Tokens that ``match`` would find now, without marking or splitting anything."""
        ...

    def lock(self, handle: Handle) -> None:
        """Protect the prefix up to the root from eviction; counts, so lock and unlock pair up."""
        ...

    def unlock(self, handle: Handle) -> None: ...

    def pages(self, handle: Handle) -> Int32s:
        """The page ids of a locked handle, [cached_len / page_size]."""
        ...

    def insert(self, token_ids: Int32s, pages: Int32s, namespace: str = "") -> InsertResult:
        """Add the whole pages of ``token_ids`` (``pages`` has one id for each) and mark them as used."""
        ...

    def evict(self, num_pages: int) -> Int32s:
        """Give up ``num_pages`` unprotected pages, or all if there are fewer, least valuable leaves first."""
        ...

    def sizes(self) -> CacheSizes: ...

    def owned_pages(self) -> Int32s:
        """Every page of the tree, in no order. Walks the tree: for checks, not for each step."""
        ...

    def observe(self, watch: TreeWatch | None) -> None:
        """Report all changes to ``watch`` from now on, or to nobody."""
        ...

    def clear(self) -> Int32s:
        """Evict all that is not protected."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError on any broken invariant of the structure."""
        ...
