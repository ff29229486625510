"""Joins the prefix cache, the free pages and the page table: who holds which page, from admission to the end.

Of a lease's pages, ``[0, handle.cached_len)`` (in tokens) belong to the prefix cache, which the handle keeps locked;
the rest of its row belongs to the lease alone::

    tokens   0 ........ handle.cached_len ........ num_tokens
    pages    | tree's, locked, maybe shared | the lease's own |

**When a page may change hands.** A plan carries the page-table entries written since the plan before it, the runner
executes plans in the order in which ``take_page_writes`` was called for them, and every plan taken is launched. So a
step sees the table as it was when its plan was made, and a later step runs after it. Hence the KV of a chunk may be
committed as soon as the chunk's plan is made: whoever finds it there reads it in a later step. And a page may be freed
while a step in flight still reads or writes it: its next owner writes it in a later step, whose plan, or one before it,
also brings the table entries that took the page from its last owner. No free has to wait for the device, as
long as a row's next use is planned after its release. If a launch fails, the KV behind committed pages was never
written: the whole cache has to go.
"""

from dataclasses import dataclass

import numpy as np

from radixserve.kvcache.base import NOTHING, Handle, Int32s
from radixserve.kvcache.pages import PagePool
from radixserve.kvcache.radix import RadixPrefixCache
from radixserve.kvcache.watch import TreeWatch


@dataclass(slots=True)
class Lease:
    """What a running request, ``owner``, holds. ``cached_len``: tokens served from the cache at admission. The manager
    replaces ``handle`` as the request's prefix grows in the tree; nobody else writes here."""

    row: int
    namespace: str
    cached_len: int
    handle: Handle
    owner: str


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Tokens of the pool now, and evicted since start."""

    total_tokens: int
    free_tokens: int
    evictable_tokens: int
    evicted_tokens: int


class CacheManager:
    """Owns the prefix cache, the free pages, the free rows and the page table ``[max_rows, max_pages_per_row]``.

    free pages + pages of the tree + pages owned by leases = all pages, each exactly once.
    """

    def __init__(self, prefixes: RadixPrefixCache, num_pages: int, max_rows: int, max_pages_per_row: int):
        self.page_size = prefixes.page_size
        self.page_table: Int32s = np.zeros((max_rows, max_pages_per_row), np.int32)
        self._prefixes = prefixes
        self._pool = PagePool(num_pages)
        self._row_pages: Int32s = np.zeros(max_rows, np.int32)
        self._free_rows = list(range(max_rows))[::-1]
        self._leases: dict[int, Lease] = {}
        self._written_rows: list[Int32s] = []
        self._written_cols: list[Int32s] = []
        self._evicted_pages = 0
        self._watch: TreeWatch | None = None

    # ---- what is there ----

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def held_pages(self, lease: Lease) -> int:
        """Pages in the lease's row, shared ones included."""
        return int(self._row_pages[lease.row])

    def cached_pages(self, row: int) -> int:
        """Pages at the beginning of a leased row that belong to the prefix cache, so that other rows may show them."""
        return self._leases[row].handle.cached_len // self.page_size

    def owner(self, row: int) -> str:
        """Who has a leased row."""
        return self._leases[row].owner

    def cached_len(self, token_ids: Int32s, namespace: str = "") -> int:
        """Tokens that ``admit`` would find cached now. Changes nothing, not even what counts as recently used."""
        return self._prefixes.cached_len(token_ids[:-1], namespace)

    def stats(self) -> CacheStats:
        return CacheStats(
            total_tokens=self._pool.num_pages * self.page_size,
            free_tokens=self._pool.num_free * self.page_size,
            evictable_tokens=self._prefixes.evictable_pages * self.page_size,
            evicted_tokens=self._evicted_pages * self.page_size,
        )

    # ---- the life of a lease: admit, extend and commit in turns, then release or drop ----

    def admit(self, token_ids: Int32s, reserve_tokens: int = 0, namespace: str = "", owner: str = "") -> Lease | None:
        """Take a row for request ``owner`` whose known tokens are ``token_ids`` and hold what is cached of them.

        The last token is never taken from the cache: its logits are needed. None, with nothing changed, when no row is
        free or when the tokens not cached plus ``reserve_tokens`` do not fit beside what is held. No page is
        allocated here but for what the cache gives; ``extend`` does that, chunk by chunk.
        """
        if not self._free_rows:
            return None
        self._report_as(owner)
        handle = self._prefixes.match(token_ids[:-1], namespace)
        new_pages = self.pages_for(len(token_ids) + reserve_tokens) - handle.cached_len // self.page_size
        if new_pages > self._available_pages():
            return None
        self._prefixes.lock(handle)
        if new_pages > self._available_pages():  # the lock has taken the prefix itself out of what can be evicted
            self._prefixes.unlock(handle)
            return None
        lease = Lease(self._free_rows.pop(), namespace, handle.cached_len, handle, owner)
        self._leases[lease.row] = lease
        if handle.cached_len:
            self._append(lease.row, self._prefixes.pages(handle))
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Make the row hold pages for its first ``num_tokens`` tokens, evicting if need be. False: nothing changed."""
        count = self.pages_for(num_tokens) - self.held_pages(lease)
        if count > 0:
            self._report_as(lease.owner)
            pages = self._take(count)
            if pages is None:
                return False
            self._append(lease.row, pages)
        return True

    def extend_decodes(self, rows: Int32s, kv_lens: Int32s) -> bool:
        """``extend`` for many rows (each once) that grow by at most one page, row i to ``kv_lens[i]`` tokens: all of
        them, or none and False."""
        held = self._row_pages[rows]
        short = kv_lens > held * self.page_size
        growing = rows[short]
        if not len(growing):
            return True
        self._report_as("")
        pages = self._take(len(growing))
        if pages is None:
            return False
        cols = held[short]
        assert (kv_lens[short] <= (cols + 1) * self.page_size).all(), "a decode grows by one page at most"
        self.page_table[growing, cols] = pages
        self._row_pages[growing] = cols + 1
        self._written_rows.append(growing)
        self._written_cols.append(cols)
        return True

    def commit(self, lease: Lease, token_ids: Int32s) -> None:
        """Let others find ``token_ids``, the lease's first tokens whose KV is stored or planned to be (see the module).

        Only whole pages go into the tree. Where another request was faster, the row switches to the tree's pages and
        its duplicates are freed.
        """
        page_size, row, old = self.page_size, lease.row, lease.handle
        num_pages = len(token_ids) // page_size
        if num_pages * page_size <= old.cached_len:
            return
        assert num_pages <= self._row_pages[row], "committed tokens have no pages"
        row_pages = self.page_table[row, :num_pages]
        self._report_as(lease.owner)
        result = self._prefixes.insert(token_ids[: num_pages * page_size], row_pages, lease.namespace)
        self._prefixes.lock(result.handle)
        self._prefixes.unlock(old)
        lease.handle = result.handle
        start, stop = old.cached_len // page_size, result.already_there // page_size
        if stop > start:
            self._pool.free(row_pages[start:stop].copy())
            self._write(row, start, self._prefixes.pages(result.handle)[start:stop])

    def release(self, lease: Lease, token_ids: Int32s) -> None:
        """End of a request: keep the whole pages of ``token_ids``, its tokens with valid KV, and free the rest."""
        self.commit(lease, token_ids)
        self.drop(lease)

    def drop(self, lease: Lease) -> None:
        """End of a request of which nothing is kept but what was committed before."""
        row = lease.row
        assert self._leases.pop(row, None) is lease, "the lease was given back before"
        first_own = lease.handle.cached_len // self.page_size
        self._pool.free(self.page_table[row, first_own : self._row_pages[row]].copy())
        self._report_as(lease.owner)
        self._prefixes.unlock(lease.handle)
        self._row_pages[row] = 0
        self._free_rows.append(row)

    # ---- once a step ----

    def take_page_writes(self) -> tuple[Int32s, Int32s, Int32s]:
        """(rows, cols, pages): the page-table entries written since the last call, for the next plan. An entry may
        occur twice, with equal pages, so the order of writing them does not matter."""
        rows = np.concatenate([NOTHING, *self._written_rows])
        cols = np.concatenate([NOTHING, *self._written_cols])
        self._written_rows.clear()
        self._written_cols.clear()
        return rows, cols, self.page_table[rows, cols]

    def flush(self) -> int:
        """Forget every prefix that no lease holds; returns how many tokens that were."""
        self._report_as("")
        pages = self._prefixes.clear()
        self._pool.free(pages)
        return len(pages) * self.page_size

    def observe(self, watch: TreeWatch | None) -> None:
        """Report what happens in the tree to ``watch`` from now on, or to nobody."""
        self._watch = watch
        self._prefixes.observe(watch)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page has exactly one owner and the table shows what the leases hold."""
        self._prefixes.check_integrity()
        owned = [self._pool.free_pages(), self._prefixes.owned_pages()]
        for row, lease in self._leases.items():
            num_cached = lease.handle.cached_len // self.page_size
            assert num_cached <= self._row_pages[row], "a row is shorter than its cached prefix"
            cached = self.page_table[row, :num_cached]
            assert np.array_equal(cached, self._prefixes.pages(lease.handle)), "a row shows other pages than the tree"
            owned.append(self.page_table[row, num_cached : self._row_pages[row]])
        owners = np.bincount(np.concatenate(owned), minlength=self._pool.num_pages)
        assert (owners == 1).all(), "a page is lost, or has two owners"
        assert len(self._free_rows) + len(self._leases) == len(self.page_table), "a row is lost"

    def _report_as(self, owner: str) -> None:
        if self._watch is not None:
            self._watch.owner = owner

    def _available_pages(self) -> int:
        """Pages that are free, and those that eviction could free."""
        return self._pool.num_free + self._prefixes.evictable_pages

    def _take(self, count: int) -> Int32s | None:
        """``count`` pages, by eviction if need be, or None with nothing changed."""
        missing = count - self._pool.num_free
        if missing > 0:
            if missing > self._prefixes.evictable_pages:
                return None
            self._evicted_pages += missing
            self._pool.free(self._prefixes.evict(missing))
        return self._pool.alloc(count)

    def _append(self, row: int, pages: Int32s) -> None:
        held = int(self._row_pages[row])
        assert held + len(pages) <= self.page_table.shape[1], "longer than the longest request"
        self._write(row, held, pages)
        self._row_pages[row] = held + len(pages)

    def _write(self, row: int, first_col: int, pages: Int32s) -> None:
        if not len(pages):
            return
        self.page_table[row, first_col : first_col + len(pages)] = pages
        self._written_rows.append(np.full(len(pages), row, np.int32))
        self._written_cols.append(np.arange(first_col, first_col + len(pages), dtype=np.int32))
