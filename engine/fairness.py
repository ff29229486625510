"""How API keys share the engine: the one that was served least for its weight is next. No torch.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588):
each tenant has a counter of the work done for it, divided by its weight, and whoever comes back from idleness starts at
the counters of those that wait, so that nobody saves up a claim. Prompt tokens found in the cache cost nothing.

A counter only decides who is next when a seat is free. ``who_yields`` says whose seat is taken back when none is.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from radixserve.engine.request import Request


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
            self._served[request.tenant] += (cost - request.charged) / request.weight
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
                heapq.heappush(heap, (served + request.total_len / request.weight, tenant, index + 1))


def who_yields(running: Collection[Request], claimant: Request, waiting: Mapping[str, float]) -> list[Request]:
    """The requests of ``running`` of which one may have to give its seat to ``claimant``, who waits: those of the
    tenant that is furthest above its share of the seats, if the claimant's has less than its own. Empty if none has to.

    A share is that part of the seats taken which a tenant's weight is of the weights of all who run or are ``waiting``
    (weights by tenant), and at least one seat. No seat is taken that its tenant needs for its share, so no exchange
    gives rise to another; and each request yields once at most, so a tenant that floods is slowed down, never stopped.
    """
    seats = Counter(request.tenant for request in running)
    weights = {**waiting, **{request.tenant: request.weight for request in running}}
    per_weight = len(running) / sum(weights.values())

    def share(tenant: str) -> float:
        return max(1.0, weights[tenant] * per_weight)

    if seats[claimant.tenant] + 1 > share(claimant.tenant):
        return []
    above = [tenant for tenant in seats if seats[tenant] - 1 >= share(tenant)]
    if not above:
        return []
    first = max(above, key=lambda tenant: (seats[tenant] / weights[tenant], tenant))
    return [request for request in running if request.tenant == first and not request.yielded]
