"""Tensor parallelism within a step: what ranks say to each other. All else that knows of ranks cuts the model
(``sharding``, ``cut_weights``) or keeps them in step (``team``, ``follower``)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from radixserve.engine.sharding import Shard
from radixserve.kernels.interface import Ops, Weight
from radixserve.kernels.quantized import Stack


class Collectives(Protocol):
    """Operations that all ranks call in the same order, with tensors of the same shape. All get the same bits."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks; may overwrite ``tensor``."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[ranks, *shape]."""
        ...


class ParallelOps:
    """``Ops`` of a rank that holds a part of each large matrix.

    Between a norm and the product that goes back to the stream a rank computes its own heads and inner columns, as if
    they were a model of their own. What leaves that stretch is summed over ranks, so the stream and everything computed
    from it alone (norms, routing, samples) are the same on all. ``vocab_size``: that of the whole model.
    ``norms_sum``: the norms of ``ops`` make the sum of what is pending, which is left to them.
    """

    def __init__(self, ops: Ops, shard: Shard, ranks: Collectives, vocab_size: int, *, norms_sum: bool = False):
        self._norms_sum = norms_sum
        self._ops = ops
        self.shard = shard
        self.ranks = ranks
        self._vocab_size = vocab_size
        self.rms_norm = ops.rms_norm
        self.add_rms_norm = ops.add_rms_norm
        self.silu_mul = ops.silu_mul
        self.gelu_mul = ops.gelu_mul
        self.rope_store = ops.rope_store
        self.project = ops.project

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

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """All ranks get all of them, and then draw the same tokens: no token has to be sent."""
        gathered = self.ranks.all_gather(self._ops.logits(hidden, weight))
        num_rows = len(weight)
        widths = [max(0, min(num_rows, self._vocab_size - rank * num_rows)) for rank in range(self.shard.size)]
        parts = [part[:, :width] for part, width in zip(gathered, widths, strict=True)]
        return torch.cat(parts, dim=-1, out=out)

    def _once(self, bias: Tensor | None) -> Tensor | None:
        """For a sum to which one rank adds it."""
        return None if self.shard.rank else bias
