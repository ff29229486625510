"""Which waiting requests get a row now. No torch."""

from collections import defaultdict

from radixserve.engine.planner import MAX_UNFINISHED
from radixserve.engine.policy import Policy, WaitingLine, who_yields
from radixserve.engine.request import PREFIX_KEY_TOKENS, Request
from radixserve.engine.running import RunningRequests, unfinished
from radixserve.kvcache.compare import common_prefix_len
from radixserve.kvcache.manager import CacheManager

# Tokens that admission leaves room for, for each running request and the new one: enough to decode a while before
# anybody must be retracted, little enough that requests with a high token limit run side by side.
DECODE_RESERVE = 64

# Whose turn it is and who waits longer than this may get the seat of another tenant with too many; one such exchange
# in so many seconds, since each costs a step of its own and, where the cache is short, the prompt once more.
SEAT_PATIENCE_S = 1.0
SEAT_INTERVAL_S = 0.25

# Requests that compute their prompt, by what those who could share a prefix with them have in common.
Leaders = dict[tuple[str, bytes], list[Request]]


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
        self._rank = policy.rank
        self._next_look_s = 0.0

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
        reserve = wanted + self._running.decodes.tokens_to_come(DECODE_RESERVE) + sum(map(_decode_reserve, prefills))
        leaders: Leaders = defaultdict(list)
        for request in self._running.prefills:
            leaders[request.prefix_key].append(request)
        for request in self.waiting.candidates(self._cached_len, self._running.by_row.values()):
            if not self.free_seats or (count >= MAX_UNFINISHED and wanted >= budget):
                break
            if self._waits_for_prefix(request, leaders):
                continue
            if not self._start(request, reserve):
                break
            started.append(request)
            leaders[request.prefix_key].append(request)
            count, wanted = count + 1, wanted + request.unfinished
            reserve += request.unfinished + _decode_reserve(request)
        return started

    def seat_to_take_back(self, now_s: float) -> Request | None:
        """The running request that must step back so that each API key gets its share of the seats, if one must (see
        ``who_yields``): the last one by the policy's rank. Call ``took_back`` once it has."""
        if now_s < self._next_look_s or not self.waiting or len(self._running) < 2:
            return None
        running = [request for request in self._running.by_row.values() if not request.ended]
        claimant = self.waiting.next_in_turn(running)
        victims: list[Request] = []
        if claimant.arrived_at < now_s - SEAT_PATIENCE_S and claimant.waits_for is None:
            victims = who_yields(running, claimant, self.waiting.weights)
        if not victims:
            self._next_look_s = now_s + SEAT_INTERVAL_S
            return None
        return max(victims, key=self._rank)

    def took_back(self, request: Request, now_s: float) -> None:
        """``request`` was retracted, since another tenant waits for a seat."""
        request.yielded = True
        self._next_look_s = now_s + SEAT_INTERVAL_S

    def _start(self, request: Request, reserve_tokens: int) -> bool:
        """Give ``request`` a row, if its tokens, its first steps and the reserve for those that run fit.

        Alone, every accepted request fits."""
        tokens = request.all_tokens()
        alone = not len(self._running)
        reserve = 0 if alone else reserve_tokens + min(DECODE_RESERVE, request.max_total - 1 - len(tokens))
        # A prompt of which all log-probabilities are wanted must not meet cached KV: it gets a namespace of its own.
        namespace = f"\0{request.arrival}" if request.needs_prompt_logprobs else request.submit.namespace
        lease = self._cache.admit(tokens, reserve, namespace, request.submit.request_id)
        if lease is None:
            assert not alone, "an accepted request does not fit the empty cache"
            return False
        self.waiting.admit(request)
        self._running.start(request, lease, tokens)
        return True

    def _cached_len(self, request: Request) -> int:
        return self._cache.cached_len(request.all_tokens(), request.submit.namespace)

    def _waits_for_prefix(self, request: Request, leaders: Leaders) -> bool:
        """Whether somebody computes a prefix of ``request`` right now, so that waiting for it saves computing it.

        Only running requests are waited for and those wait for nobody, so there is no deadlock; when one is aborted
        or retracted the question is asked anew.
        """
        if not self._shares_prefixes or request.needs_prompt_logprobs:
            return False
        leader = request.waits_for
        if leader is None or leader.lease is None or leader.ended or leader.published >= request.shared_len:
            request.waits_for, request.shared_len = self._best_leader(request, leaders)
        return request.waits_for is not None

    def _best_leader(self, request: Request, leaders: Leaders) -> tuple[Request | None, int]:
        """Who computes the longest prefix of ``request`` that is worth waiting for, and how many tokens that is."""
        candidates = leaders.get(request.prefix_key)
        if not candidates:
            return None, 0
        tokens, page_size = request.all_tokens(), self._cache.page_size
        best, best_len = None, 0
        for leader in candidates:
            shared = min(common_prefix_len(leader.known, tokens), len(tokens) - 1) // page_size * page_size
            if shared > max(best_len, leader.published) and not leader.needs_prompt_logprobs:
                best, best_len = leader, shared
        if best is None or best_len - self._cached_len(request) < max(page_size, PREFIX_KEY_TOKENS):
            return None, 0
        return best, best_len


def _decode_reserve(request: Request) -> int:
    """Tokens to keep free for the first decode steps of a request whose prompt is being computed."""
    return min(DECODE_RESERVE, request.max_total - 1 - len(request.known))
