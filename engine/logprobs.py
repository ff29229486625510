"""Log-probabilities of sampled and of prompt tokens, and of their best alternatives, from the device to messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from radixserve.engine.messages import TokenLogprobs
from radixserve.engine.step import PrefillChunk
from radixserve.engine.transfer import to_device, to_host

_LOGIT_ROWS = 64  # looked at together: what is computed of the logits of a whole step or chunk would take gigabytes


class LogprobRows(NamedTuple):
    """n positions; the K best tokens of each are sorted, best first, of which position i reports ``num_top[i]``."""

    num_top: list[int]
    token_ids: Tensor  # int64 [n]
    logprobs: Tensor  # fp32 [n]
    ranks: Tensor  # int64 [n], from 1
    top_ids: Tensor  # int64 [n, K]
    top_logprobs: Tensor  # fp32 [n, K]

    def to_host(self) -> LogprobRows:
        """The same on the host, once the copies that this starts are done."""
        num_top, *tensors = self
        return LogprobRows(num_top, *map(to_host, tensors))

    def messages(self) -> list[TokenLogprobs]:
        """One message for each position; call on the host's copy."""
        num_top, *tensors = self
        return [
            TokenLogprobs(token, logprob, list(zip(ids[:count], values[:count], strict=True)), rank)
            for count, token, logprob, rank, ids, values in zip(num_top, *map(Tensor.tolist, tensors), strict=True)
        ]


def logprob_rows(logits_of: Callable[[slice], Tensor], token_ids: Tensor, num_top: Sequence[int]) -> LogprobRows:
    """Log-softmax of n positions at ``token_ids`` int64 [n] and at the best tokens of each. ``logits_of``: [m, vocab]
    of some of them."""
    starts = range(0, len(num_top), _LOGIT_ROWS)
    parts = [slice(start, start + _LOGIT_ROWS) for start in starts]
    columns = [_columns(logits_of(part), token_ids[part], max(num_top)) for part in parts]
    return LogprobRows(list(num_top), token_ids, *map(torch.cat, zip(*columns, strict=True)))


def _columns(logits: Tensor, token_ids: Tensor, most: int) -> tuple[Tensor, ...]:
    """Logprobs, ranks, top_ids and top_logprobs, as in ``LogprobRows``, with the ``most`` best tokens."""
    # Row by row, where a reduction over many rows at once may sum up in an order that depends on how many there are.
    logprobs = logits.log_softmax(dim=-1)
    chosen = logits.gather(1, token_ids[:, None])
    top = logits.topk(min(most, logits.shape[-1]), dim=-1).indices
    ranks = (logits > chosen).sum(dim=-1) + 1
    return logprobs.gather(1, token_ids[:, None])[:, 0], ranks, top, logprobs.gather(1, top)


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
        num_top = [self._num_top[chunk.row]] * len(predicting)
        rows = logprob_rows(lambda part: self._logits(predicting[part]), token_ids, num_top)
        return ScoredChunk(chunk.row, before is not None, rows)
