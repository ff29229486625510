"""Log-probabilities of tokens and of their best alternatives, from logits on the device to messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve.engine.messages import TokenLogprobs
from radixserve.engine.transfer import to_host


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """n positions; the K best tokens of each are sorted, best first, of which position i reports ``num_top[i]``."""

    num_top: list[int]
    token_ids: Tensor  # int64 [n]
    logprobs: Tensor  # fp32 [n]
    ranks: Tensor  # int64 [n], from 1
    top_ids: Tensor  # int64 [n, K]
    top_logprobs: Tensor  # fp32 [n, K]

    def to_host(self) -> LogprobRows:
        """The same on the host, once the copies that this starts are done."""
        tensors = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return LogprobRows(self.num_top, *map(to_host, tensors))

    def messages(self) -> list[TokenLogprobs]:
        """One message for each position; call on the host's copy."""
        tensors = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        rows = zip(self.num_top, *(tensor.tolist() for tensor in tensors), strict=True)
        return [
            TokenLogprobs(token, logprob, list(zip(ids[:count], values[:count], strict=True)), rank)
            for count, token, logprob, rank, ids, values in rows
        ]


def logprob_rows(logits: Tensor, token_ids: Tensor, num_top: list[int]) -> LogprobRows:
    """Log-softmax of logits [n, vocab] at ``token_ids`` int64 [n] and at the best tokens of each row."""
    # Row by row, where a reduction over many rows at once may sum up in an order that depends on how many there are.
    logprobs = logits.log_softmax(dim=-1)
    chosen = logits.gather(1, token_ids[:, None])
    top = logits.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    return LogprobRows(
        num_top=num_top,
        token_ids=token_ids,
        logprobs=logprobs.gather(1, token_ids[:, None])[:, 0],
        ranks=(logits > chosen).sum(dim=-1) + 1,
        top_ids=top.indices,
        top_logprobs=logprobs.gather(1, top.indices),
    )


def join_rows(parts: list[LogprobRows]) -> LogprobRows:
    """Concatenate positions; all parts have the same K."""
    return LogprobRows(
        num_top=[count for part in parts for count in part.num_top],
        token_ids=torch.cat([part.token_ids for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_logprobs=torch.cat([part.top_logprobs for part in parts]),
    )
