"""Log-probabilities of prompt tokens, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve.engine.logprobs import LogprobRows, join_rows, logprob_rows
from radixserve.engine.messages import TokenLogprobs
from radixserve.engine.step import PrefillChunk
from radixserve.engine.transfer import to_device

_LOGIT_ROWS = 64  # computed at a time: a whole chunk's logits would take hundreds of megabytes


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """The tokens of one chunk. The first has no logprob when nothing, or nothing computed, precedes it."""

    row: int
    first_is_known: bool
    logprobs: LogprobRows | None

    def to_host(self) -> ScoredChunk:
        return ScoredChunk(self.row, self.first_is_known, self.logprobs.to_host() if self.logprobs else None)

    def messages(self) -> list[TokenLogprobs | None]:
        """One entry for each token of the chunk."""
        unknown: list[TokenLogprobs | None] = [] if self.first_is_known else [None]
        return unknown + (list(self.logprobs.messages()) if self.logprobs else [])


class PromptLogprobs:
    """Owns, for each row that wants prompt logprobs, the hidden state that predicts its next chunk's first token."""

    def __init__(self, logits: Callable[[Tensor], Tensor]):
        self._logits = logits
        self._num_top: dict[int, int] = {}
        self._last_hidden: dict[int, Tensor] = {}  # [1, H]

    def set_row(self, row: int, num_top: int | None) -> None:
        """A new request takes ``row``; ``num_top`` None: it wants no prompt logprobs."""
        self._num_top.pop(row, None)
        self._last_hidden.pop(row, None)
        if num_top is not None:
            self._num_top[row] = num_top

    def score(self, chunks: Sequence[PrefillChunk], hidden: Tensor) -> list[ScoredChunk]:
        """``hidden`` [chunk tokens, H]: final states of all chunks, one after the other."""
        if not self._num_top:
            return []
        states = torch.split(hidden, [len(chunk.token_ids) for chunk in chunks])
        pairs = zip(chunks, states, strict=True)
        return [self._score_chunk(chunk, state) for chunk, state in pairs if chunk.row in self._num_top]

    def _score_chunk(self, chunk: PrefillChunk, states: Tensor) -> ScoredChunk:
        before = self._last_hidden.get(chunk.row)
        self._last_hidden[chunk.row] = states[-1:].clone()
        predicting = states[:-1] if before is None else torch.cat((before, states[:-1]))
        if not len(predicting):
            return ScoredChunk(chunk.row, False, None)
        token_ids = to_device(chunk.token_ids[-len(predicting) :].astype("int64"), states.device)
        parts = [
            logprob_rows(self._logits(part), ids, [self._num_top[chunk.row]] * len(ids))
            for part, ids in zip(torch.split(predicting, _LOGIT_ROWS), torch.split(token_ids, _LOGIT_ROWS), strict=True)
        ]
        return ScoredChunk(chunk.row, before is not None, join_rows(parts))
