"""``Ops`` on CUDA: Triton where fusing or an early start pays, the vendor's library for large products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.kernels import triton_experts, triton_linear, triton_ops, triton_quantized
from radixserve.kernels.interface import norm_of_stream
from radixserve.kernels.quantized import Product, QuantizedMatrix, choose_product
from radixserve.kernels.torch_ops import TorchOps

_MAX_TOKENS_IN_PARTS = 256
_MAX_COLUMNS_IN_PARTS = 4096


class CudaOps:
    """Stateless; see ``Ops`` for shapes. ``pdl``: programmatic dependent launch (compute capability 9.0 and later).
    ``experts``: whose mixtures of experts are used; None: those of ``triton_experts``. ``multiplies_fp8``: whether
    the device does, with scales of rows."""

    def __init__(self, pdl: bool, experts: TorchOps | None = None, *, multiplies_fp8: bool = False) -> None:
        self._pdl, self._experts, self._multiplies_fp8 = pdl, experts, multiplies_fp8

    def embed(self, ids: Tensor, weight: Tensor, hidden_size: int, scale: float = 1.0) -> Tensor:
        rows = F.embedding(ids, weight)
        return rows if scale == 1.0 else rows * scale

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_ops.rms_norm(x, weight, eps, None, self._pdl)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        # x comes from a product of the library, which lets nothing start before it ends: an early launch only costs.
        return triton_ops.rms_norm(x, weight, eps, residual, pdl=False), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_ops.silu_mul(gate_up, self._pdl)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_ops.gelu_mul(gate_up, self._pdl)

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
        if self._experts:
            return self._experts.experts(x, router, gate_up, down, per_token, normalized, slots)
        tiles = self._tiles(x, per_token, len(router))
        routing = triton_experts.route(self._scores(x, router), slots, per_token, normalized, tiles, self._pdl)
        return triton_experts.experts(x, gate_up, down, routing, tiles, self._pdl)

    def _tiles(self, x: Tensor, per_token: int, num_experts: int) -> triton_experts.Tiles:
        shared_bytes = torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor
        return triton_experts.choose_tiles(len(x), per_token, num_experts, shared_bytes)

    def _scores(self, x: Tensor, router: Tensor) -> Tensor:
        """Of each expert for each token, fp32 [T, E]."""
        scores = torch.empty(len(x), len(router), dtype=torch.float32, device=x.device)
        if triton_linear.is_fused(len(x), router):
            return triton_linear.fused_linear(x, router, out=scores, pdl=self._pdl)
        return torch.mm(x, router.t(), out_dtype=torch.float32, out=scores)

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(hidden.shape[0], weight.shape[0], dtype=torch.float32, device=hidden.device)
        if hidden.shape[0] == 1 and triton_linear.is_fused(1, weight):
            return triton_linear.fused_linear(hidden, weight, out=out, pdl=self._pdl)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)

    def project(
        self,
        stream: Tensor,
        pending: Tensor | None,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = stream.shape[0]
        fused = bias is None and triton_linear.is_fused(num_tokens, weight)
        if fused and num_tokens == 1 and pending is None:
            product = triton_linear.fused_linear(stream, weight, norm=norm, eps=eps, gated=gated, pdl=self._pdl)
            return stream, product
        normed, stream = norm_of_stream(self, stream, pending, norm, eps)
        if fused:
            return stream, triton_linear.fused_linear(normed, weight, gated=gated, pdl=self._pdl)
        product = F.linear(normed, weight, bias)
        return stream, triton_ops.silu_mul(product, pdl=False) if gated else product

    def linear(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(y, weight, bias)

    def project_quantized(
        self,
        stream: Tensor,
        pending: Tensor | None,
        norm: Tensor,
        eps: float,
        matrix: QuantizedMatrix,
        bias: Tensor | None = None,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        normed, stream = norm_of_stream(self, stream, pending, norm, eps)
        product = self.quantized_linear(normed, matrix, bias)
        return stream, self.silu_mul(product) if gated else product

    def quantized_linear(self, y: Tensor, matrix: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
        if matrix.order is not None:
            y = y.index_select(1, matrix.order)
        match self._choose_product(y, matrix):
            case Product.NARROW:
                return triton_quantized.narrow_linear(y, matrix, bias, self._pdl)
            case Product.SCALED:
                return triton_quantized.scaled_linear(y, matrix, bias, self._pdl)
            case Product.WIDE:
                return self.linear(y, triton_quantized.dequantize(matrix, y.dtype), bias)

    def _choose_product(self, y: Tensor, matrix: QuantizedMatrix) -> Product:
        has_scaled = self._multiplies_fp8 and y.dtype == torch.bfloat16  # the only type of its results
        return choose_product(len(y), matrix.form, matrix.shape, has_scaled=has_scaled)

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if bias is None and triton_linear.is_fused(y.shape[0], weight):
            return triton_linear.fused_linear(y, weight, residual=stream, pdl=self._pdl), None
        parts = 1 if bias is not None else _num_parts(y.shape[0], weight)
        return stream, F.linear(y, weight, bias) if parts == 1 else _linear_in_parts(y, weight, parts)


def _num_parts(num_tokens: int, weight: Tensor) -> int:
    """Into how many parts a product that adds to the stream is cut along its inner dimension, so that its few columns
    keep all multiprocessors busy; as measured on an H200. The norm that follows sums them up."""
    out_features, in_features = weight.shape
    if num_tokens > _MAX_TOKENS_IN_PARTS or out_features > _MAX_COLUMNS_IN_PARTS or in_features % 256:
        return 1
    return 4 if num_tokens <= 64 or out_features <= 1024 else 2


def _linear_in_parts(y: Tensor, weight: Tensor, parts: int) -> Tensor:
    """y [T, in] @ weight[out, in].T as parts [P, T, out] whose sum it is."""
    y_parts = y.view(y.shape[0], parts, -1).transpose(0, 1)
    return torch.bmm(y_parts, weight.view(weight.shape[0], parts, -1).permute(1, 2, 0))
