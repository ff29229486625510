"""A prefix cache that keeps nothing: each request computes its whole prompt (``--disable-radix-cache``)."""

from radixserve.kvcache.base import Handle, InsertResult, Int32s
from radixserve.kvcache.radix import RadixPrefixCache


class NaivePrefixCache(RadixPrefixCache):
    """A tree that stays empty: it finds no prefix, and an insert takes over no page, so all stay with the caller."""

    def insert(self, token_ids: Int32s, pages: Int32s, namespace: str = "") -> InsertResult:
        return InsertResult(Handle(0, self._root), already_there=0)
