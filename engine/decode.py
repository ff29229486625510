"""The rows that decode, as arrays, so that planning a step of hundreds of requests costs microseconds. No torch."""

from __future__ import annotations

import numpy as np

from radixserve.engine.step import Int32s


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
