"""Who is admitted next, and who must step back when pages run out: one small table. No torch.

API keys share the engine by the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024, arXiv 2401.00588): each tenant has a counter of the work done for it, divided by its weight, and whoever
comes back from idleness starts at the counters of those that wait, so that nobody saves up a claim. Prompt tokens found
in the cache cost nothing. A counter only decides who is next when a seat is free. ``who_yields`` says whose seat is
taken back when none is.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from radixserve.engine.request import Request

# Longest-prefix-match looks at so many waiting requests, and lets none be overtaken more often than this.
_LOOKAHEAD = 64
_MAX_OVERTAKEN = 32

Rank = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """``rank`` orders requests: the lowest is admitted first, the highest is retracted first. It never changes for a
    request and ends in its arrival, so that one running request is always the last to step back."""

    rank: Callable[[Request], Rank]
    prefers_cached: bool = False


POLICIES = {
    "fcfs": Policy(lambda request: (request.arrival,)),
    "lpm": Policy(lambda request: (request.arrival,), prefers_cached=True),
    "priority": Policy(lambda request: (request.submit.priority, request.arrival)),
}


@dataclass(slots=True)
class _Line:
    """The waiting requests of one tenant, by rank."""

    weight: float
    requests: list[Request] = field(default_factory=list)
    num_tokens: int = 0


class WaitingLine:
    """Owns the requests that wait for a row: a line for each tenant (API key), in the order of their rank; a retracted
    one is back at its old place. Tenants take turns by their ``FairShares``."""

    def __init__(self, policy: Policy) -> None:
        self.shares = FairShares()
        self._policy = policy
        self._lines: dict[str, _Line] = {}  # none of them is empty
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(line.requests for line in self._lines.values())

    @property
    def num_tokens(self) -> int:
        return sum(line.num_tokens for line in self._lines.values())

    def has_room(self, tenant: str, weight: float, num_tokens: int, *, max_requests: int, max_tokens: int) -> bool:
        """Whether one more request of ``num_tokens`` may wait.

        A full line still takes requests of a tenant that has less than its share of it waiting, so that no tenant locks
        the others out. A single request may have more than ``max_tokens``.
        """
        if not self._num_requests:
            return True
        if self._num_requests < max_requests and self.num_tokens + num_tokens <= max_tokens:
            return True
        own = self._lines.get(tenant, _Line(weight))
        others = sum(line.weight for line in self._lines.values() if line is not own)
        share = weight / (weight + others) if others else 0.0
        return len(own.requests) + 1 <= max_requests * share and own.num_tokens + num_tokens <= max_tokens * share

    def add(self, request: Request) -> None:
        line = self._lines.get(request.submit.tenant)
        if line is None:
            self.shares.join(request.submit.tenant, self._lines)
            line = self._lines[request.submit.tenant] = _Line(request.submit.weight)
        insort(line.requests, request, key=self._policy.rank)
        line.num_tokens += request.total_len
        self._num_requests += 1

    def candidates(self, cached_len: Callable[[Request], int], running: Iterable[Request]) -> Iterable[Request]:
        """Waiting requests in the order in which to try them. ``cached_len`` tells the tokens cached of one; the
        ``running`` ones are charged before tenants are compared."""
        orders = {tenant: self._ordered(line.requests, cached_len) for tenant, line in self._lines.items()}
        if len(orders) == 1:
            return next(iter(orders.values()))
        self.shares.settle(running)
        return self.shares.interleave(orders)

    @property
    def weights(self) -> dict[str, float]:
        """Of the tenants that wait."""
        return {tenant: line.weight for tenant, line in self._lines.items()}

    def next_in_turn(self, running: Iterable[Request]) -> Request:
        """The first request of the tenant whose turn it is; somebody waits. As for ``candidates``."""
        self.shares.settle(running)
        return self._lines[self.shares.least_served(self._lines)].requests[0]

    def remove(self, request: Request) -> list[Request]:
        """Take ``request`` out; returns those before it in its line, with lpm."""
        line = self._lines[request.submit.tenant]
        index = bisect_left(line.requests, self._policy.rank(request), key=self._policy.rank)
        assert index < len(line.requests) and line.requests[index] is request, "the request does not wait"
        del line.requests[index]
        line.num_tokens -= request.total_len
        self._num_requests -= 1
        if not line.requests:
            del self._lines[request.submit.tenant]
            self.shares.leave(request.submit.tenant)
        return line.requests[:index] if self._policy.prefers_cached else []

    def admit(self, request: Request) -> None:
        """Take ``request`` out for its admission; with lpm those of its tenant that stood before it were overtaken."""
        for passed in self.remove(request):
            passed.overtaken += 1

    def _ordered(self, line: list[Request], cached_len: Callable[[Request], int]) -> list[Request]:
        """With lpm the first ones are ordered by cached prefix, longest first, so that prefixes are used before they
        are evicted (the cache-aware order of SGLang, arXiv 2312.07104); those overtaken too often go before all."""
        if not self._policy.prefers_cached:
            return line.copy()
        window = line[:_LOOKAHEAD]
        overdue = [request for request in window if request.overtaken >= _MAX_OVERTAKEN]
        others = [request for request in window if request.overtaken < _MAX_OVERTAKEN]
        others.sort(key=lambda request: -cached_len(request))  # stable: by rank where equal
        return overdue + others + line[_LOOKAHEAD:]


class FairShares:
    """Owns the counters: tokens served to each tenant over its weight."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._floor = 0.0  # of a tenant that comes when nobody waits: the counter of who waited last

    def join(self, tenant: str, waiting: Collection[str]) -> None:
        """``tenant`` begins to wait beside the tenants ``waiting``."""
        floor = min((self._served[other] for other in waiting), default=self._floor)
        self._served[tenant] = max(self._served.get(tenant, 0.0), floor)

    def leave(self, tenant: str) -> None:
        """The last request of ``tenant`` waits no more."""
        self._floor = self._served[tenant]

    def settle(self, requests: Iterable[Request]) -> None:
        """Charge what was done for ``requests`` since the last time."""
        for request in requests:
            cost = request.cost
            self._served[request.submit.tenant] += (cost - request.charged) / request.submit.weight
            request.charged = cost

    def least_served(self, tenants: Iterable[str]) -> str:
        """Whose turn it is."""
        return min(tenants, key=lambda tenant: (self._served[tenant], tenant))

    def interleave(self, lines: Mapping[str, Sequence[Request]]) -> Iterator[Request]:
        """All requests of ``lines`` (by tenant), each tenant's in its order, as if each were served when it is its
        turn."""
        heap = [(self._served[tenant], tenant, 0) for tenant in lines]
        heapq.heapify(heap)
        while heap:
            served, tenant, index = heapq.heappop(heap)
            request = lines[tenant][index]
            yield request
            if index + 1 < len(lines[tenant]):
                heapq.heappush(heap, (served + request.total_len / request.submit.weight, tenant, index + 1))


def who_yields(running: Collection[Request], claimant: Request, waiting: Mapping[str, float]) -> list[Request]:
    """The requests of ``running`` of which one may have to give its seat to ``claimant``, who waits: those of the
    tenant that is furthest above its share of the seats, if the claimant's has less than its own. Empty if none has to.

    A share is that part of the seats taken which a tenant's weight is of the weights of all who run or are ``waiting``
    (weights by tenant), and at least one seat. No seat is taken that its tenant needs for its share, so no exchange
    gives rise to another; and each request yields once at most, so a tenant that floods is slowed down, never stopped.
    """
    seats = Counter(request.submit.tenant for request in running)
    weights = {**waiting, **{request.submit.tenant: request.submit.weight for request in running}}
    per_weight = len(running) / sum(weights.values())

    def share(tenant: str) -> float:
        return max(1.0, weights[tenant] * per_weight)

    if seats[claimant.submit.tenant] + 1 > share(claimant.submit.tenant):
        return []
    above = [tenant for tenant in seats if seats[tenant] - 1 >= share(tenant)]
    if not above:
        return []
    first = max(above, key=lambda tenant: (seats[tenant] / weights[tenant], tenant))
    return [request for request in running if request.submit.tenant == first and not request.yielded]
