"""Builds a step from the running requests: how prompts share its budget, which tokens it computes, and on which pages.
No torch."""

from collections.abc import Sequence
from dataclasses import replace

from radixserve.engine.request import Request
from radixserve.engine.running import RunningRequests, unfinished
from radixserve.engine.step import Int32s, PrefillChunk, RowSetup, StepPlan
from radixserve.kvcache.manager import CacheManager

# Prompts that may be unfinished at the same time when the step's budget is spent already. Enough that a short prompt
# passes a burst of long ones, few enough that most prompts find what earlier ones left in the prefix cache.
MAX_UNFINISHED = 8


def decode_limit(num_rows: int, step_tokens: int) -> int:
    """Requests that may run at once, so that a step of ``step_tokens`` holds all decodes and leaves at least a
    quarter of itself to prefill."""
    return min(num_rows, max(1, step_tokens - step_tokens // 4))


def share_budget(unfinished: Sequence[int], budget: int) -> list[int]:
    """Divide ``budget`` tokens among prompts, given the tokens each still needs, the oldest prompt first.

    The oldest gets half, so that it always advances; the others get the rest, shortest first, so that a short prompt
    never waits for the end of a long one; what they leave goes to the oldest. No prompt gets more than it needs, and
    budget remains only when all are satisfied.
    """
    shares = [0] * len(unfinished)
    if not unfinished:
        return shares
    shares[0] = min(unfinished[0], (budget + 1) // 2)
    left = budget - shares[0]
    for index in sorted(range(1, len(unfinished)), key=unfinished.__getitem__):
        shares[index] = min(unfinished[index], left)
        left -= shares[index]
    shares[0] += min(unfinished[0] - shares[0], left)
    return shares


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
                sampling = request.submit.sampling
                eos = () if sampling.ignore_eos else self._eos_token_ids
                setups.append(RowSetup(row, sampling, request.seed, request.known, request.prompt_len, eos))
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
        if not (constrained := self._running.constrained):
            return plan
        return replace(plan, masked=tuple(i for i, row in enumerate(plan.sampled_rows) if row in constrained))
