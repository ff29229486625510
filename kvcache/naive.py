"""A prefix cache that keeps nothing: each request computes its whole prompt (``--disable-radix-cache``)."""

from __future__ import annotations

from radixserve.kvcache.base import NOTHING, CacheSizes, Handle, InsertResult, Int32s
from radixserve.kvcache.watch import TreeWatch

_NO_PREFIX = Handle(cached_len=0, node=None)


class NaivePrefixCache:
    """Finds no prefix and takes over no page: an insert caches zero tokens, so all pages stay with the caller."""

    def __init__(self, page_size: int):
        self.page_size = page_size

    def observe(self, watch: TreeWatch | None) -> None:
        pass

    def match(self, token_ids: Int32s, namespace: str = "") -> Handle:
        return _NO_PREFIX

    def cached_len(self, token_ids: Int32s, namespace: str = "") -> int:
        return 0

    def lock(self, handle: Handle) -> None:
        pass

    def unlock(self, handle: Handle) -> None:
        pass

    def pages(self, handle: Handle) -> Int32s:
        return NOTHING

    def insert(self, token_ids: Int32s, pages: Int32s, namespace: str = "") -> InsertResult:
        return InsertResult(_NO_PREFIX, already_there=0)

    def evict(self, num_pages: int) -> Int32s:
        return NOTHING

    def sizes(self) -> CacheSizes:
        return CacheSizes(evictable=0, protected=0)

    def owned_pages(self) -> Int32s:
        return NOTHING

    def clear(self) -> Int32s:
        return NOTHING

    def check_integrity(self) -> None:
        pass
