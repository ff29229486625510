"""Tensor parallelism within a step: what ranks say to each other. All else that knows of ranks cuts the model
(``sharding``, ``cut_weights``) or keeps them in step (``team``, ``follower``)."""

from typing import Protocol

import torch
from torch import Tensor

from radixserve.engine.sharding import Shard
from radixserve.kernels.interface import LogitPart, Ops, Weight
from radixserve.kernels.quantized import Stack


class Collectives(Protocol):
    """Operations that all ranks call in the same order, with tensors of the same shape. All get the same bits."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, exact where all but one give zeros; may overwrite ``tensor``."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[ranks, *shape]."""
        ...


class ParallelOps:
    """``Ops`` of a rank that holds a part of each large matrix.

    Between a norm and the product that goes back to the stream a rank computes its own heads and inner columns, as if
    they were a model of their own. What leaves that stretch is summed over ranks, so the stream and everything computed
    from it alone (norms, routing) are the same on all; of the logits each has a part, see ``ParallelLogits``.
    ``norms_sum``: the norms of ``ops`` make the sum of what is pending, which is left to them.
    """

    def __init__(self, ops: Ops, shard: Shard, ranks: Collectives, *, norms_sum: bool = False):
        self._norms_sum = norms_sum
        self._ops = ops
        self.shard = shard
        self.ranks = ranks
        self.rms_norm = ops.rms_norm
        self.add_rms_norm = ops.add_rms_norm
        self.silu_mul = ops.silu_mul
        self.gelu_mul = ops.gelu_mul
        self.rope_store = ops.rope_store
        self.project = ops.project
        self.logits = ops.logits

    def embed(self, ids: Tensor, weight: Tensor, hidden_size: int, scale: float = 1.0) -> Tensor:
        """Each token's row comes from the rank that has it."""
        rows = ids - self.shard.rank * len(weight)
        is_ours = (rows >= 0) & (rows < len(weight))
        found = self._ops.embed(rows * is_ours, weight, hidden_size, scale)
        return self.ranks.all_reduce(found.masked_fill_(~is_ours.unsqueeze(-1), 0.0))

    def linear(self, y: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Of a layer whose inner dimension is cut."""
        return self.ranks.all_reduce(self._ops.linear(y, weight, self._once(bias)))

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Left pending: the stream must be added once, not by each rank."""
        if self._norms_sum:
            return self._ops.add_linear(stream, y, weight, self._once(bias))
        return stream, self.linear(y, weight, bias)

    def experts(
        self, x: Tensor, router: Tensor, gate_up: Stack, down: Stack, per_token: int, normalized: bool, slots: Tensor
    ) -> Tensor:
        answer = self._ops.experts(x, router, gate_up, down, per_token, normalized, slots)
        if self._norms_sum:
            return answer
        return self.ranks.all_reduce(answer if answer.dim() == 2 else answer.sum(0))

    def _once(self, bias: Tensor | None) -> Tensor | None:
        """For a sum to which one rank adds it."""
        return None if self.shard.rank else bias


class ParallelLogits:
    """What becomes of logits [S, vocab] of which each rank computes the columns [S, ceil(vocab / ranks)] of its part of
    the vocabulary: all ranks draw the same tokens, so that no token has to be sent.

    Most draws tell the other ranks a few scores only; all else gathers the logits.
    """

    def __init__(self, shard: Shard, ranks: Collectives, vocab_size: int):
        parts = [LogitPart(rank, shard.size, vocab_size) for rank in range(shard.size)]
        self._ranks = ranks
        self._columns = [part.columns for part in parts]
        self.part = parts[shard.rank]

    def gather(self, part: Tensor) -> Tensor:
        """All logits. For NCCL, which no graph shall hold."""
        gathered = self._ranks.all_gather(part)
        columns = zip(gathered, self._columns, strict=True)
        return torch.cat([logits[:, :count] for logits, count in columns], dim=-1)

    def add_up(self, lines: Tensor) -> Tensor:
        """All ranks' ``SamplingKernels.lines_of_part``."""
        return self._ranks.all_reduce(lines)
