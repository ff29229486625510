"""``Ops`` on CUDA: Triton where fusing or an early start pays, the vendor's library for large products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.kernels import triton_linear, triton_ops


class CudaOps:
    """Stateless; see ``Ops`` for shapes. ``pdl``: programmatic dependent launch (compute capability 9.0 and later)."""

    def __init__(self, pdl: bool) -> None:
        self._pdl = pdl

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_ops.rms_norm(x, weight, eps, None, self._pdl)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return triton_ops.rms_norm(x, weight, eps, residual, self._pdl), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_ops.silu_mul(gate_up, self._pdl)

    def rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        return triton_ops.rope_store(
            qkv, positions, cos_sin, slots, k_cache, v_cache, q_norm, k_norm, eps, pdl=self._pdl
        )

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None and triton_linear.is_fused(x.shape[0], weight):
            return triton_linear.fused_linear(x, weight, pdl=self._pdl)
        return F.linear(x, weight, bias)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if hidden.shape[0] == 1 and triton_linear.is_fused(1, weight):
            return triton_linear.fused_linear(hidden, weight, dtype=torch.float32, pdl=self._pdl)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)

    def project(
        self, x: Tensor, pending: Tensor | None, norm: Tensor, eps: float, weight: Tensor, gated: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Norm of the residual stream (``x`` plus what is ``pending``) times weight.T; gated: [gate; up] weights, then
        silu(gate) * up. Returns the stream, with nothing pending, and the product."""
        fused = triton_linear.is_fused(x.shape[0], weight)
        if fused and x.shape[0] == 1 and pending is None:
            return x, triton_linear.fused_linear(x, weight, norm=norm, eps=eps, gated=gated, pdl=self._pdl)
        if pending is None:
            normed = self.rms_norm(x, norm, eps)
        else:
            normed, x = self.add_rms_norm(pending, x, norm, eps)
        if fused:
            return x, triton_linear.fused_linear(normed, weight, gated=gated, pdl=self._pdl)
        product = F.linear(normed, weight)
        return x, self.silu_mul(product) if gated else product

    def add_linear(self, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add y times weight.T to the stream ``x``: at once where that is free, else left pending for ``project``."""
        if triton_linear.is_fused(y.shape[0], weight):
            return triton_linear.fused_linear(y, weight, residual=x, pdl=self._pdl), None
        return x, F.linear(y, weight)
