"""The cache manager: leases from admission to the end, and where each page is at every moment."""

import numpy as np
import pytest

from radixserve.kvcache.base import Int32s
from radixserve.kvcache.manager import CacheManager, Lease
from radixserve.kvcache.naive import NaivePrefixCache
from radixserve.kvcache.radix import RadixPrefixCache


def make(page_size: int = 4, num_pages: int = 32, max_rows: int = 4) -> CacheManager:
    return CacheManager(RadixPrefixCache(page_size), num_pages, max_rows, max_pages_per_row=num_pages)


def ids(*spans: tuple[int, int]) -> Int32s:
    """Token ids first..last of each span, both included."""
    return np.concatenate([np.arange(first, last + 1, dtype=np.int32) for first, last in spans])


def start(cache: CacheManager, tokens: Int32s) -> Lease:
    """Admit a request and give it all pages of its prompt."""
    lease = cache.admit(tokens)
    assert lease is not None and cache.extend(lease, len(tokens))
    return lease


def row_of(cache: CacheManager, lease: Lease) -> list[int]:
    return cache.page_table[lease.row, : cache.held_pages(lease)].tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_a_prompt_cached_whole_still_computes_its_last_token(page_size: int, length: int) -> None:
    cache = make(page_size, num_pages=128)
    tokens = ids((1, length))
    for expected in (0, (length - 1) // page_size * page_size, (length - 1) // page_size * page_size):
        lease = start(cache, tokens)
        assert lease.cached_len == expected < length
        assert cache.held_pages(lease) == -(-length // page_size)
        cache.release(lease, tokens)
        cache.check_integrity()


def test_a_second_request_starts_on_the_pages_of_the_first_while_that_still_runs() -> None:
    cache = make()
    first = start(cache, ids((1, 10)))
    cache.commit(first, ids((1, 10)))
    second = start(cache, ids((1, 9), (50, 55)))
    assert second.cached_len == 8
    assert row_of(cache, second)[:2] == row_of(cache, first)[:2]
    cache.check_integrity()
    cache.drop(first)
    cache.drop(second)
    cache.check_integrity()
    assert cache.stats().evictable_tokens == 8


def test_a_prefix_is_found_chunk_by_chunk_while_it_is_prefilled() -> None:
    cache = make()
    prompt = ids((1, 20))
    lease = cache.admit(prompt)
    assert lease is not None
    for computed in (6, 12, 20):
        assert cache.extend(lease, computed)
        cache.commit(lease, prompt[:computed])
        assert cache.cached_len(prompt) == min(computed, 19) // 4 * 4
        cache.check_integrity()


def test_duplicates_of_a_prefix_inserted_meanwhile_are_freed_once_and_the_row_switches() -> None:
    cache = make(page_size=16, num_pages=80)
    prompt = ids((1, 512))
    first, second = start(cache, prompt), start(cache, prompt)
    duplicates = row_of(cache, second)
    cache.take_page_writes()
    cache.commit(first, prompt)
    assert len(cache.take_page_writes()[0]) == 0

    cache.commit(second, prompt)

    assert row_of(cache, second) == row_of(cache, first)
    assert not set(duplicates) & set(row_of(cache, second))
    rows, cols, pages = cache.take_page_writes()
    assert rows.tolist() == [second.row] * 32
    assert pages[np.argsort(cols)].tolist() == row_of(cache, first)
    assert cache.stats().free_tokens == (80 - 32) * 16
    cache.check_integrity()
    cache.release(first, prompt)
    cache.release(second, prompt)
    cache.check_integrity()
    assert cache.stats().free_tokens + cache.stats().evictable_tokens == 80 * 16


def test_release_keeps_whole_pages_and_frees_the_unaligned_tail_and_what_was_reserved() -> None:
    cache = make()
    lease = start(cache, ids((1, 6)))
    assert cache.extend(lease, 20)
    cache.release(lease, ids((1, 11)))
    stats = cache.stats()
    assert (stats.evictable_tokens, stats.free_tokens) == (8, 120)
    cache.check_integrity()


def test_drop_keeps_only_what_was_committed() -> None:
    cache = make()
    lease = start(cache, ids((1, 20)))
    cache.commit(lease, ids((1, 9)))
    cache.drop(lease)
    assert cache.cached_len(ids((1, 21))) == 8
    assert cache.stats().free_tokens == 120
    cache.check_integrity()


def test_admission_counts_the_locked_prefix_as_no_longer_evictable() -> None:
    cache = make(num_pages=8)
    lease = start(cache, ids((1, 24)))
    cache.release(lease, ids((1, 24)))  # 6 pages cached, 2 free
    prompt = ids((1, 20), (100, 111))  # 5 pages cached, 3 more needed: 2 free and 1 evictable once the 5 are locked
    assert cache.admit(prompt, reserve_tokens=1) is None
    cache.check_integrity()
    assert cache.stats().evictable_tokens == 24
    admitted = cache.admit(prompt)
    assert admitted is not None and admitted.cached_len == 20
    assert cache.extend(admitted, 32)
    assert cache.stats().free_tokens == cache.stats().evictable_tokens == 0
    cache.check_integrity()


def test_admission_refuses_what_does_not_fit_beside_running_requests() -> None:
    cache = make(num_pages=8)
    running = start(cache, ids((1, 20)))
    assert cache.admit(ids((101, 113))) is None
    assert cache.admit(ids((101, 112)), reserve_tokens=1) is None
    assert cache.admit(ids((101, 112))) is not None
    cache.drop(running)


def test_admission_refuses_when_no_row_is_free() -> None:
    cache = make(max_rows=2)
    leases = [start(cache, ids((1, 3))) for _ in range(2)]
    assert cache.num_free_rows == 0
    assert cache.admit(ids((1, 3))) is None
    cache.drop(leases[0])
    again = cache.admit(ids((1, 3)))
    assert again is not None and again.row == leases[0].row


def test_extend_evicts_what_nobody_holds_and_fails_without_a_trace_when_that_is_too_little() -> None:
    cache = make(num_pages=8)
    old = start(cache, ids((100, 115)))
    cache.release(old, ids((100, 115)))  # 4 pages cached, 4 free
    lease = start(cache, ids((1, 16)))
    assert (cache.stats().free_tokens, cache.stats().evictable_tokens) == (0, 16)
    assert cache.extend(lease, 20)
    assert cache.stats().evicted_tokens == 4
    held = row_of(cache, lease)
    assert not cache.extend(lease, 36)
    assert row_of(cache, lease) == held
    assert cache.cached_len(ids((100, 116))) == 12
    cache.check_integrity()


def test_decodes_get_a_page_only_where_they_cross_into_one() -> None:
    cache = make()
    crossing, inside = start(cache, ids((1, 8))), start(cache, ids((101, 106)))
    rows = np.array([crossing.row, inside.row], np.int32)
    cache.take_page_writes()
    assert cache.extend_decodes(rows, np.array([9, 7], np.int32))
    assert (cache.held_pages(crossing), cache.held_pages(inside)) == (3, 2)
    written_rows, written_cols, pages = cache.take_page_writes()
    assert (written_rows.tolist(), written_cols.tolist()) == ([crossing.row], [2])
    assert pages.tolist() == row_of(cache, crossing)[2:]
    cache.check_integrity()


def test_decodes_are_extended_all_or_none() -> None:
    cache = make(num_pages=5)
    leases = [start(cache, ids((1, 8))), start(cache, ids((101, 108)))]
    rows = np.array([lease.row for lease in leases], np.int32)
    assert not cache.extend_decodes(rows, np.array([9, 9], np.int32))
    assert [cache.held_pages(lease) for lease in leases] == [2, 2]
    assert cache.extend_decodes(rows[:1], np.array([9], np.int32))
    cache.check_integrity()


def test_page_writes_tell_the_latest_page_even_where_an_entry_was_written_twice() -> None:
    cache = make()
    prompt = ids((1, 8))
    first, second = start(cache, prompt), start(cache, prompt)
    cache.commit(first, prompt)
    cache.commit(second, prompt)
    rows, cols, pages = cache.take_page_writes()
    assert pages.tolist() == cache.page_table[rows, cols].tolist()
    assert {(r, c) for r, c in zip(rows.tolist(), cols.tolist(), strict=True)} == {
        (lease.row, col) for lease in (first, second) for col in (0, 1)
    }
    assert [len(part) for part in cache.take_page_writes()] == [0, 0, 0]


def test_flush_spares_what_running_requests_hold() -> None:
    cache = make()
    done, running = start(cache, ids((1, 12))), start(cache, ids((1, 5), (50, 60)))
    cache.release(done, ids((1, 12)))
    cache.commit(running, ids((1, 5), (50, 60)))
    assert cache.flush() == 8
    assert cache.cached_len(ids((1, 5), (50, 60))) == 12
    cache.check_integrity()


def test_namespaces_do_not_meet() -> None:
    cache = make()
    lease = cache.admit(ids((1, 12)), namespace="tenant")
    assert lease is not None and cache.extend(lease, 12)
    cache.release(lease, ids((1, 12)))
    assert cache.cached_len(ids((1, 12))) == 0
    assert cache.cached_len(ids((1, 12)), "tenant") == 8


def test_looking_up_the_cached_length_does_not_keep_a_prefix_alive() -> None:
    cache = make(num_pages=4)
    for first in (1, 101):
        cache.release(start(cache, ids((first, first + 7))), ids((first, first + 7)))
    assert cache.cached_len(ids((1, 9))) == 8
    start(cache, ids((201, 208)))
    assert cache.cached_len(ids((1, 9))) == 0


def test_giving_a_lease_back_twice_is_caught() -> None:
    cache = make()
    lease = start(cache, ids((1, 5)))
    cache.drop(lease)
    with pytest.raises(AssertionError, match="given back before"):
        cache.drop(lease)


def test_without_a_radix_cache_nothing_is_kept_and_every_page_comes_back() -> None:
    cache = CacheManager(NaivePrefixCache(4), num_pages=16, max_rows=2, max_pages_per_row=16)
    for _ in range(3):
        lease = start(cache, ids((1, 10)))
        assert lease.cached_len == 0
        cache.commit(lease, ids((1, 10)))
        cache.check_integrity()
        held = row_of(cache, lease)
        assert cache.extend(lease, 14)
        assert row_of(cache, lease)[:3] == held
        cache.release(lease, ids((1, 13)))
        cache.check_integrity()
        assert cache.stats().free_tokens == 64
    assert cache.flush() == 0
