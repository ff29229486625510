"""The cache manager under random requests, with a simulated device that runs up to two steps late.

Each slot of the simulated KV buffer holds the whole text up to its token, as attention would see it. A step writes its
tokens through the device's copy of the page table, then checks that every position of the request reads the request's
own text. So a page that is freed, shared, switched or evicted at the wrong moment shows as foreign content, however
the pages are counted.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from radixserve.kvcache.base import Int32s
from radixserve.kvcache.manager import CacheManager, Lease
from radixserve.kvcache.naive import NaivePrefixCache
from radixserve.kvcache.radix import RadixPrefixCache

NUM_PAGES, MAX_ROWS, MAX_PAGES_PER_ROW, MAX_LAG = 14, 4, 8, 2


@dataclass
class Request:
    lease: Lease
    tokens: list[int]
    computed: int  # tokens whose KV is stored, or planned to be
    start: int = 0  # first of them that the latest plan computes


@dataclass
class Plan:
    writes: tuple[Int32s, Int32s, Int32s]
    spans: list[tuple[int, str, list[int], int]] = field(default_factory=list)  # row, namespace, tokens, first new one


class Device:
    """Executes plans in order; stores, for each slot, the text that ends there."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.table = np.full((MAX_ROWS, MAX_PAGES_PER_ROW), -1, np.int32)
        self.kv: dict[int, tuple[str, list[int]]] = {}

    def execute(self, plan: Plan) -> None:
        for row, col, page in list(zip(*plan.writes, strict=True))[::-1]:
            self.table[row, col] = page
        for row, namespace, tokens, start in plan.spans:
            for position in range(start, len(tokens)):
                self.kv[self.slot(row, position)] = (namespace, tokens[: position + 1])
        for row, namespace, tokens, _ in plan.spans:
            for position in range(len(tokens)):
                assert self.kv[self.slot(row, position)] == (namespace, tokens[: position + 1]), "foreign KV"

    def slot(self, row: int, position: int) -> int:
        page = int(self.table[row, position // self.page_size])
        assert page >= 0, "a plan uses a page-table entry that was never sent"
        return page * self.page_size + position % self.page_size


class ManagerMachine(RuleBasedStateMachine):
    page_size: int
    naive: bool

    def __init__(self) -> None:
        super().__init__()
        prefixes = (NaivePrefixCache if self.naive else RadixPrefixCache)(self.page_size)
        self.cache = CacheManager(prefixes, NUM_PAGES, MAX_ROWS, MAX_PAGES_PER_ROW)
        self.device = Device(self.page_size)
        self.in_flight: deque[Plan] = deque()
        self.running: list[Request] = []
        self.sampled = itertools.count(1000)

    @rule(
        symbols=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        tail=st.integers(0, 63),
        namespace=st.sampled_from(["", "", "salt"]),
        reserve_pages=st.integers(0, 2),
    )
    def admit(self, symbols: list[int], tail: int, namespace: str, reserve_pages: int) -> None:
        body = itertools.chain(*([7] * (self.page_size - 1) + [symbol] for symbol in symbols))
        tokens = [*body, *[5] * min(tail, self.page_size - 1)]
        reserve = reserve_pages * self.page_size
        before = self.cache.stats()
        cached = self.cache.cached_len(np.array(tokens, np.int32), namespace)
        lease = self.cache.admit(np.array(tokens, np.int32), reserve, namespace)
        needed = self.cache.pages_for(len(tokens) + reserve) - cached // self.page_size
        if lease is None:
            after = self.cache.stats()
            assert (after.free_tokens, after.evictable_tokens) == (before.free_tokens, before.evictable_tokens)
            room = before.free_tokens + before.evictable_tokens - cached
            assert len(self.running) == MAX_ROWS or needed * self.page_size > room
            return
        assert lease.cached_len == cached < len(tokens)
        assert self.available_tokens >= needed * self.page_size
        self.running.append(Request(lease, tokens, cached))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Plan a chunk or a decode for some of the running requests, and launch it."""
        chosen = [r for r in self.running if data.draw(st.booleans())]
        decodes = [r for r in chosen if r.computed == len(r.tokens)]
        decodes = [r for r in decodes if len(r.tokens) < MAX_PAGES_PER_ROW * self.page_size]
        planned = [r for r in chosen if r.computed < len(r.tokens) and self.plan_chunk(r, data)]
        planned += self.plan_decodes(decodes)
        plan = Plan(self.cache.take_page_writes())
        for request in planned:
            tokens = request.tokens[: request.computed]
            plan.spans.append((request.lease.row, request.lease.namespace, tokens, request.start))
        self.in_flight.append(plan)
        for request in planned:
            if data.draw(st.booleans()):
                self.cache.commit(request.lease, np.array(request.tokens[: request.computed], np.int32))
        while len(self.in_flight) > MAX_LAG:
            self.run_oldest_step()

    @precondition(lambda self: self.in_flight)
    @rule()
    def run_oldest_step(self) -> None:
        self.device.execute(self.in_flight.popleft())

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans(), everyone=st.booleans())
    def end(self, data: st.DataObject, keep: bool, everyone: bool) -> None:
        ending = self.running[:] if everyone else [data.draw(st.sampled_from(self.running))]
        self.give_back(ending, keep)

    @rule()
    def flush(self) -> None:
        evictable = self.cache.stats().evictable_tokens
        assert self.cache.flush() == evictable
        assert self.cache.stats().evictable_tokens == 0

    @invariant()
    def every_page_has_one_owner(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_free_rows == MAX_ROWS - len(self.running)

    @property
    def available_tokens(self) -> int:
        """Tokens that fit on free pages and on pages that eviction could free."""
        stats = self.cache.stats()
        return stats.free_tokens + stats.evictable_tokens

    def plan_chunk(self, request: Request, data: st.DataObject) -> bool:
        size = data.draw(st.integers(1, len(request.tokens) - request.computed))
        if not self.cache.extend(request.lease, request.computed + size):
            assert self.available_tokens < size
            return False
        request.start = request.computed
        request.computed += size
        return True

    def plan_decodes(self, decodes: list[Request]) -> list[Request]:
        rows = np.array([r.lease.row for r in decodes], np.int32)
        if not self.cache.extend_decodes(rows, np.array([len(r.tokens) + 1 for r in decodes], np.int32)):
            return []
        for request in decodes:
            request.start = request.computed
            request.tokens = [*request.tokens, next(self.sampled)]
            request.computed += 1
        return decodes

    def give_back(self, requests: list[Request], keep: bool) -> None:
        for request in requests:
            self.running.remove(request)
            if keep:
                self.cache.release(request.lease, np.array(request.tokens[: request.computed], np.int32))
            else:
                self.cache.drop(request.lease)

    def teardown(self) -> None:
        while self.in_flight:
            self.run_oldest_step()
        self.give_back(self.running[:], keep=True)
        self.cache.flush()
        self.cache.check_integrity()
        assert self.cache.stats().free_tokens == NUM_PAGES * self.page_size


@pytest.mark.parametrize(("page_size", "naive"), [(1, False), (4, False), (16, False), (64, False), (4, True)])
def test_no_request_ever_reads_foreign_kv_and_no_page_is_lost(page_size: int, naive: bool) -> None:
    machine = type("Machine", (ManagerMachine,), {"page_size": page_size, "naive": naive})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
