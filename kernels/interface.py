"""What the model code needs from kernels. Shapes: T tokens of a step, S sequences, H hidden, D head_dim.

``Tensor`` arguments live on one device. Implementations: ``torch_ops`` / ``torch_attention`` (any device, the oracle),
FlashInfer and Triton on CUDA; chosen in ``select.py`` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention kernel must know before its first plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of q, k and v


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Which tokens of a step belong to which sequence: first ``num_decodes`` sequences of one query token each,
    then the prefill chunks. Host copies are for planners; device tensors for kernels that need no plan.

    ``page_table`` is the runner's whole table [max_rows, max_pages]; sequence s reads row ``rows[s]``.
    """

    num_decodes: int
    page_size: int
    rows: Tensor  # int32 [S]
    kv_lens: Tensor  # int32 [S], KV length with this step's tokens stored
    query_starts: Tensor  # int32 [S + 1], offsets of each sequence's queries in T
    page_table: Tensor  # int32 [max_rows, max_pages]
    rows_host: NDArray[np.int32]
    kv_lens_host: NDArray[np.int32]
    query_starts_host: NDArray[np.int32]
    page_table_host: NDArray[np.int32]  # the runner's mirror, same shape as page_table


class AttentionKernel(Protocol):
    """Causal attention of each sequence's queries over its own pages (grouped-query heads, no gathering copy)."""

    def plan(self, layout: BatchLayout) -> None:
        """Prepare one step; called once before the layers run."""
        ...

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [T, q_heads, D]; k_cache, v_cache [pages, page_size, kv_heads, D] of one layer -> [T, q_heads, D]."""
        ...


class Ops(Protocol):
    """Pointwise and small fused operations of a transformer layer."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] -> [T, H], statistics in fp32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual); may overwrite both inputs."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> silu(first half) * second half, [T, I]."""
        ...

    def rope_store(
        self,
        qkv: Tensor,  # [T, (q_heads + 2 kv_heads) * D]
        positions: Tensor,  # int32 [T]
        cos_sin: Tensor,  # fp32 [max_positions, rotary_dim]: cosines, then sines (half-rotation, "neox" pairs)
        slots: Tensor,  # int64 [T]: page * page_size + offset
        k_cache: Tensor,  # [pages, page_size, kv_heads, D]
        v_cache: Tensor,
        q_norm: Tensor | None,  # [D]: per-head RMS norm before RoPE (Qwen3), or None
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Split qkv, norm heads if asked, rotate q and k, store k and v by slot; return q [T, q_heads, D].
        Slots below 0 are padding and are not stored."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] @ weight[out, in].T (+ bias)."""
        ...

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [S, H] @ weight[vocab, H].T -> fp32 [S, vocab], not rounded to a narrower type where it is largest."""
        ...
