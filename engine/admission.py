"""Which waiting requests get a row now. No torch."""

from __future__ import annotations

from radixserve.engine.policy import Policy, WaitingLine
from radixserve.engine.prefill import MAX_UNFINISHED
from radixserve.engine.request import Request
from radixserve.engine.running import RunningRequests, unfinished
from radixserve.engine.step import Int32s
from radixserve.kvcache.compare import common_prefix_len
from radixserve.kvcache.manager import CacheManager, Lease

# Tokens that admission leaves room for, for each running request and the new one: enough to decode a while before
# anybody must be retracted, little enough that requests with a high token limit run side by side.
DECODE_RESERVE = 64

# Waiting for a prefix that somebody computes is worth a step when it saves at least so many tokens.
MIN_SHARED_TOKENS = 16


class Admission:
    """Owns the waiting line. ``shares_prefixes``: requests wait for a prefix that another one computes right now,
    instead of computing it too (pointless with a cache that keeps nothing)."""

    def __init__(
        self, cache: CacheManager, running: RunningRequests, policy: Policy, *, max_running: int, shares_prefixes: bool
    ) -> None:
        self.waiting = WaitingLine(policy)
        self._cache = cache
        self._running = running
        self._max_running = max_running
        self._shares_prefixes = shares_prefixes

    @property
    def free_seats(self) -> int:
        """Requests that may start beside those that run."""
        return self._max_running - len(self._running)

    def admit(self, budget: int) -> list[Request]:
        """Start waiting requests, in the policy's order, until seats, pages or work for the next step (``budget``
        tokens of prefill) run short. Nobody overtakes a request that only lacks pages."""
        started: list[Request] = []
        if not self.waiting or not self.free_seats:
            return started
        prefills = unfinished(self._running.prefills)
        count, wanted = len(prefills), sum(request.unfinished for request in prefills)
        for request in self.waiting.candidates(self._cached_len):
            if not self.free_seats or (count >= MAX_UNFINISHED and wanted >= budget):
                break
            if self._waits_for_prefix(request):
                continue
            tokens = request.all_tokens()
            lease = self._take_pages(request, tokens)
            if lease is None:
                break
            self.waiting.admit(request)
            self._running.start(request, lease, tokens)
            started.append(request)
            count, wanted = count + 1, wanted + request.unfinished
        return started

    def _take_pages(self, request: Request, tokens: Int32s) -> Lease | None:
        """A lease, if ``tokens`` and the reserve fit beside what runs. Alone, every accepted request fits."""
        reserve = self._reserve(request, tokens) if len(self._running) else 0
        # A prompt of which all log-probabilities are wanted must not meet cached KV: it gets a namespace of its own.
        namespace = f"\0{request.arrival}" if request.needs_prompt_logprobs else request.namespace
        lease = self._cache.admit(tokens, reserve, namespace)
        assert lease is not None or len(self._running), "an accepted request does not fit the empty cache"
        return lease

    def _reserve(self, request: Request, tokens: Int32s) -> int:
        """Tokens that will soon be stored beside ``tokens``: the next ones of all, and prompts admitted before."""
        reserve = self._running.decodes.tokens_to_come(DECODE_RESERVE)
        reserve += min(DECODE_RESERVE, request.max_total - 1 - len(tokens))
        for other in unfinished(self._running.prefills):
            reserve += other.unfinished + min(DECODE_RESERVE, other.max_total - 1 - len(other.known))
        return reserve

    def _cached_len(self, request: Request) -> int:
        return self._cache.cached_len(request.all_tokens(), request.namespace)

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether somebody computes a prefix of ``request`` right now, so that waiting for it saves computing it.

        Only running requests are waited for and those wait for nobody, so there is no deadlock; one that is aborted
        or retracted is no longer among the prefills, and the question is asked anew.
        """
        if not self._shares_prefixes or request.needs_prompt_logprobs:
            return False
        leader = request.waits_for
        if leader is not None and leader in self._running.prefills and leader.published < request.shared_len:
            return True
        request.waits_for, request.shared_len = self._leader(request)
        return request.waits_for is not None

    def _leader(self, request: Request) -> tuple[Request | None, int]:
        """Who computes the longest prefix of ``request`` that is worth waiting for, and how many tokens that is."""
        tokens, page_size = request.all_tokens(), self._cache.page_size
        best, best_len = None, 0
        for leader in self._running.prefills:
            if leader.lease is None or leader.lease.namespace != request.namespace:
                continue
            shared = min(common_prefix_len(leader.known, tokens), len(tokens) - 1) // page_size * page_size
            if shared > max(best_len, leader.published):
                best, best_len = leader, shared
        if best is None or best_len - self._cached_len(request) < max(page_size, MIN_SHARED_TOKENS):
            return None, 0
        return best, best_len
