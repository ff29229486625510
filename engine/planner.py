"""Builds a step from the running requests: which of their tokens it computes, and on which pages. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from radixserve.engine.prefill import share_budget
from radixserve.engine.request import Request
from radixserve.engine.running import RunningRequests, unfinished
from radixserve.engine.step import Int32s, PrefillChunk, RowSetup, StepPlan
from radixserve.kvcache.manager import CacheManager

Share = tuple[Request, int]  # a request and the number of its known tokens that the next step computes


class StepPlanner:
    """Plans one step at a time: ``share`` the budget, ``reserve_pages`` for it, then ``plan``, which takes the step as
    launched."""

    def __init__(self, cache: CacheManager, running: RunningRequests, eos_token_ids: tuple[int, ...]) -> None:
        self._cache = cache
        self._running = running
        self._eos_token_ids = eos_token_ids

    def share(self, budget: int) -> list[Share]:
        """What each unfinished prompt gets of ``budget`` tokens."""
        prefills = unfinished(self._running.prefills)
        sizes = share_budget([request.unfinished for request in prefills], budget)
        return [(request, size) for request, size in zip(prefills, sizes, strict=True) if size]

    def reserve_pages(self, decode_rows: Int32s, shares: Sequence[Share]) -> bool:
        """Pages for all that the step stores. False when they are short; what was reserved so far is kept."""
        if not self._cache.extend_decodes(decode_rows, self._running.decodes.next_lens(decode_rows)):
            return False
        for request, size in shares:
            assert request.lease is not None
            if not self._cache.extend(request.lease, request.computed + size):
                return False
        return True

    def plan(self, step: int, decode_rows: Int32s, shares: Sequence[Share]) -> StepPlan:
        """Step number ``step``, whose pages are reserved. Its requests count as computed so far."""
        decodes = self._running.decodes
        kv_lens = decodes.next_lens(decode_rows)
        decodes.advance(decode_rows)
        self._running.launched(decode_rows, step)
        setups: list[RowSetup] = []
        chunks: list[PrefillChunk] = []
        for request, size in shares:
            assert request.lease is not None
            row, start = request.lease.row, request.computed
            if not request.set_up:
                setups.append(self._setup(request, row))
                request.set_up = True
            request.computed += size
            chunks.append(PrefillChunk(row, request.known[start : start + size], start, not request.unfinished))
            self._running.launched(row, step)
            if not request.unfinished:
                decodes.start(row, len(request.known), request.max_total)
        sharing = self._running.shared
        shared = None if sharing is None else sharing.among(decode_rows)
        writes = self._cache.take_page_writes()
        plan = StepPlan(step, tuple(setups), *writes, decode_rows, kv_lens, tuple(chunks), shared)
        return replace(plan, masked=self._masked(plan)) if self._running.constrained else plan

    def _masked(self, plan: StepPlan) -> tuple[int, ...]:
        return tuple(sample for sample, row in enumerate(plan.sampled_rows) if row in self._running.constrained)

    def _setup(self, request: Request, row: int) -> RowSetup:
        eos = () if request.sampling.ignore_eos else self._eos_token_ids
        return RowSetup(row, request.sampling, request.seed, request.known, request.prompt_len, eos)
