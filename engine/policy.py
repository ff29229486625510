"""Who is admitted next, and who must step back when pages run out: one small table. No torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


def _by_arrival(request: Request) -> Rank:
    return (request.arrival,)


def _by_priority(request: Request) -> Rank:
    return (request.priority, request.arrival)


POLICIES = {
    "fcfs": Policy(_by_arrival),
    "lpm": Policy(_by_arrival, prefers_cached=True),
    "priority": Policy(_by_priority),
}


class WaitingLine:
    """Owns the requests that wait for a row, in the order of their rank; a retracted one is back at its old place."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._line: list[Request] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    def add(self, request: Request) -> None:
        insort(self._line, request, key=self._policy.rank)

    def remove(self, request: Request) -> None:
        index = self._place(request)
        del self._line[index]

    def candidates(self, cached_len: Callable[[Request], int]) -> list[Request]:
        """Waiting requests in the order in which to try them. ``cached_len`` tells the tokens cached of one.

        With lpm the first ones are ordered by cached prefix, longest first, so that prefixes are used before they are
        evicted (the cache-aware order of SGLang, arXiv 2312.07104); those overtaken too often go before all.
        """
        if not self._policy.prefers_cached:
            return self._line.copy()
        window = self._line[:_LOOKAHEAD]
        overdue = [request for request in window if request.overtaken >= _MAX_OVERTAKEN]
        others = [request for request in window if request.overtaken < _MAX_OVERTAKEN]
        others.sort(key=lambda request: -cached_len(request))  # stable: by rank where equal
        return overdue + others + self._line[_LOOKAHEAD:]

    def admit(self, request: Request) -> None:
        """Take ``request`` out for its admission; those before it were overtaken."""
        index = self._place(request)
        del self._line[index]
        if self._policy.prefers_cached:
            for passed in self._line[:index]:
                passed.overtaken += 1

    def _place(self, request: Request) -> int:
        index = bisect_left(self._line, self._policy.rank(request), key=self._policy.rank)
        assert index < len(self._line) and self._line[index] is request, "the request does not wait"
        return index
