"""Tensor parallelism within a step: what ranks say to each other. All else that knows of ranks cuts the model
(``sharding``, ``cut_weights``) or keeps them in step (``team``, ``follower``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from radixserve.engine.errors import ConfigError
from radixserve.engine.sharding import Shard
from radixserve.kernels.interface import Ops
from radixserve.kernels.quantized import QuantizedMatrix


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
    """

    def __init__(self, ops: Ops, shard: Shard, ranks: Collectives, vocab_size: int):
        self._ops = ops
        self._shard = shard
        self._ranks = ranks
        self._vocab_size = vocab_size
        self.rms_norm = ops.rms_norm
        self.add_rms_norm = ops.add_rms_norm
        self.silu_mul = ops.silu_mul
        self.gelu_mul = ops.gelu_mul
        self.rope_store = ops.rope_store
        self.project = ops.project
        self.project_quantized = ops.project_quantized

    def embed(self, ids: Tensor, weight: Tensor, hidden_size: int, scale: float = 1.0) -> Tensor:
        """Each token's row comes from the rank that has it."""
        rows = ids - self._shard.rank * len(weight)
        is_ours = (rows >= 0) & (rows < len(weight))
        found = self._ops.embed(rows * is_ours, weight, hidden_size, scale)
        return self._ranks.all_reduce(found.masked_fill_(~is_ours.unsqueeze(-1), 0.0))

    def linear(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Of a layer whose inner dimension is cut."""
        return self._ranks.all_reduce(self._ops.linear(y, weight, None if self._shard.rank else bias))

    def quantized_linear(self, y: Tensor, matrix: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
        return self._ranks.all_reduce(self._ops.quantized_linear(y, matrix, None if self._shard.rank else bias))

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Left pending: the stream must be added once, not by each rank."""
        return stream, self.linear(y, weight, bias)

    def experts(
        self,
        x: Tensor,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        per_token: int,
        normalized: bool,
        slots: Tensor,
    ) -> Tensor:
        answer = self._ops.experts(x, router, gate_up, down, per_token, normalized, slots)
        return self._ranks.all_reduce(answer if answer.dim() == 2 else answer.sum(0))

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """All ranks get all of them, and then draw the same tokens: no token has to be sent."""
        gathered = self._ranks.all_gather(self._ops.logits(hidden, weight))
        num_rows = len(weight)
        widths = [max(0, min(num_rows, self._vocab_size - rank * num_rows)) for rank in range(self._shard.size)]
        parts = [part[:, :width] for part, width in zip(gathered, widths, strict=True)]
        return torch.cat(parts, dim=-1, out=out)


class TorchRanks:
    """``Collectives`` of torch.distributed: NCCL between GPUs, gloo between processes on a CPU. Owns the process's
    default group."""

    def __init__(self, size: int, device: torch.device):
        self._size = size
        self._device = device

    @classmethod
    def meet(cls, shard: Shard, device: torch.device, meeting: Path) -> TorchRanks:
        """Blocks until all ranks are there, who find each other by files in ``meeting``."""
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")  # all ranks are on this host
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{meeting}/store",
            rank=shard.rank,
            world_size=shard.size,
            device_id=device if on_gpu else None,
        )
        ranks = cls(shard.size, device)
        ranks.least(0)  # NCCL connects with the first collective, which must not be one that is captured in a graph
        return ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(self._size * len(tensor), *tensor.shape[1:])
        # Renamed in torch 2.13, where the old name warns.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, tensor)
        return gathered.view(self._size, *tensor.shape)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)


def check_no_group() -> None:
    """Raises ``ConfigError`` where the process has a default group already."""
    if dist.is_initialized():
        raise ConfigError(
            "tensor_parallel_size above 1 needs torch's default process group, which this process has set up before; "
            "close the other LLM, or use a process of its own"
        )


def abort_collectives() -> None:
    """Let those fail that wait for a rank that is gone. gloo's fail by themselves."""
    group = dist.group.WORLD
    if group is not None and dist.get_backend(group) == "nccl":
        group.abort()


def leave_ranks() -> None:
    """Undo ``TorchRanks.meet``, once no collective will follow."""
    if dist.is_initialized():
        dist.destroy_process_group()
