"""The requests that have a row: which compute their prompt, which decode, which only wait to leave. No torch."""

from collections.abc import Iterable

import numpy as np

from radixserve.engine.request import Request
from radixserve.engine.sharing import SharedRows
from radixserve.engine.step import Int32s
from radixserve.kvcache.manager import CacheManager, Lease


class DecodeRows:
    """Owns, per row, how many tokens have KV once all launched steps are done, and where the request must end.

    Sampled tokens need not be known: a row at KV length L feeds token number L, whatever it is, and samples the next.
    """

    def __init__(self, num_rows: int) -> None:
        self._decoding = np.zeros(num_rows, np.bool_)
        self._kv_lens = np.zeros(num_rows, np.int32)
        self._max_totals = np.zeros(num_rows, np.int32)

    def start(self, row: int, kv_len: int, max_total: int) -> None:
        """From now on ``row`` decodes: its token after the first ``kv_len`` is sampled by a launched step."""
        self._decoding[row] = True
        self._kv_lens[row] = kv_len
        self._max_totals[row] = max_total

    def stop(self, row: int) -> None:
        self._decoding[row] = False

    def kv_len(self, row: int) -> int:
        return int(self._kv_lens[row])

    def due(self) -> Int32s:
        """Rows of the next step. A row whose last launched sample reaches ``max_total`` surely ends: not due."""
        return np.flatnonzero(self._decoding & (self._kv_lens + 1 < self._max_totals)).astype(np.int32)

    def next_lens(self, rows: Int32s) -> Int32s:
        """KV lengths of ``rows`` with the token that the next step feeds."""
        return self._kv_lens[rows] + np.int32(1)

    def advance(self, rows: Int32s) -> None:
        """A step that feeds one token of each of ``rows`` is launched."""
        self._kv_lens[rows] += 1

    def tokens_to_come(self, at_most: int) -> int:
        """Tokens that all decoding rows may still store, counting no more than ``at_most`` for each."""
        left = (self._max_totals - 1 - self._kv_lens)[self._decoding]
        return int(np.minimum(left, at_most).sum())


class RunningRequests:
    """Owns the rows from admission to the return of the lease, and which launched step was the last with each.

    A request that ends while a launched step contains it keeps its row and pages until that step is completed.
    """

    def __init__(self, cache: CacheManager, *, tells_shared: bool) -> None:
        num_rows = len(cache.page_table)
        self.by_row: dict[int, Request] = {}
        self.constrained: dict[int, Request] = {}  # those of ``by_row`` that have a constraint
        self.prefills: list[Request] = []  # oldest admission or jump first, until the last chunk is completed
        self.decodes = DecodeRows(num_rows)
        self.shared = SharedRows(cache) if tells_shared else None
        self.completed_step = 0
        self._cache = cache
        self._last_step = np.zeros(num_rows, np.int64)
        self._leaving: list[Request] = []

    def __len__(self) -> int:
        return len(self.by_row)

    def start(self, request: Request, lease: Lease, known: Int32s) -> None:
        """``request`` has a row now and will compute those of its ``known`` tokens that were not cached."""
        request.lease, request.known, request.waits_for = lease, known, None
        request.computed = request.published = lease.cached_len
        request.set_up = False
        self.by_row[lease.row] = request
        if request.constraint is not None:
            self.constrained[lease.row] = request
        self.prefills.append(request)

    def prefilled(self, request: Request) -> None:
        """The step with the last chunk of ``request`` is completed."""
        self.prefills.remove(request)
        if self.shared is not None:
            self.shared.join(_lease_of(request).row)

    def jumped(self, request: Request) -> None:
        """The output of ``request``, which decodes, has got tokens that no launched step samples: it computes what has
        no KV yet like a prompt, and decodes on from there."""
        row = _lease_of(request).row
        request.known, request.computed = request.all_tokens(), self.decodes.kv_len(row)
        request.set_up = False
        self.decodes.stop(row)
        self.prefills.append(request)

    def launched(self, rows: Int32s | int, step: int) -> None:
        """``step`` is launched with ``rows``."""
        self._last_step[rows] = step

    def leave(self, request: Request) -> None:
        """Give the row and pages of ``request`` back, at once or when the last launched step with it is completed."""
        lease = _lease_of(request)
        if self._last_step[lease.row] <= self.completed_step:
            self._give_back(request, lease)
            return
        self._detach(request, lease)
        self._leaving.append(request)

    def complete_step(self, step: int) -> None:
        """``step``, the oldest launched one, is completed. Follow with ``release_leaving``."""
        self.completed_step += 1
        assert step == self.completed_step, "steps are completed in the order of their launch"

    def release_leaving(self) -> None:
        """Give back the rows that the completed step was the last to hold."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self.leave(request)

    def _give_back(self, request: Request, lease: Lease) -> None:
        num_stored = self.decodes.kv_len(lease.row) if not request.unfinished else request.computed
        self._detach(request, lease)
        del self.by_row[lease.row]
        self.constrained.pop(lease.row, None)
        request.lease = None
        if request.sound and lease.namespace == request.submit.namespace:
            self._cache.release(lease, request.all_tokens()[:num_stored])
        else:
            self._cache.drop(lease)

    def _detach(self, request: Request, lease: Lease) -> None:
        self.decodes.stop(lease.row)
        if self.shared is not None:
            self.shared.leave(lease.row)
        if request in self.prefills:
            self.prefills.remove(request)


def unfinished(prefills: Iterable[Request]) -> list[Request]:
    """Those of ``prefills`` that still have tokens to launch."""
    return [request for request in prefills if request.unfinished]


def _lease_of(request: Request) -> Lease:
    assert request.lease is not None, "the request has no row"
    return request.lease
