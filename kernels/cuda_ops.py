"""``Ops`` on CUDA: Triton where fusing or an early start pays, the vendor's library for large products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixserve.kernels import triton_experts, triton_linear, triton_ops, triton_quantized, triton_scaled
from radixserve.kernels.interface import HeadPlaces, Norm, RankSums, Weight, norm_of_stream
from radixserve.kernels.quantized import Product, QuantizedMatrix, Stack, choose_product
from radixserve.kernels.torch_ops import TorchOps
from radixserve.kernels.triton_even import EvenProducts, choose_tile
from radixserve.kernels.triton_quantized_vector import vector_linear

_MAX_TOKENS_IN_PARTS = 256
_MAX_COLUMNS_IN_PARTS = 4096


class CudaOps(TorchOps):
    """Stateless; see ``Ops`` for shapes. ``pdl``: programmatic dependent launch (compute capability 9.0 and later).
    ``experts``: whose mixtures of experts are used; None: those of ``triton_experts``. ``multiplies_fp8``: whether
    the device does, with scales of rows. ``sums``: with them all that is left pending is a rank's part of a sum, which
    the norm that takes it makes. ``even``: makes products of few tokens where it is faster."""

    def __init__(
        self,
        pdl: bool,
        experts: TorchOps | None = None,
        *,
        multiplies_fp8: bool = False,
        sums: RankSums | None = None,
        even: EvenProducts | None = None,
    ) -> None:
        super().__init__()
        self._even = even
        self._pdl, self._experts, self._multiplies_fp8, self._sums = pdl, experts, multiplies_fp8, sums

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return triton_ops.rms_norm(x, norm, None, self._pdl)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if self._sums is not None:
            if self._sums.fits(x):
                return self._sums.add_rms_norm(x, residual, norm), residual
            x = self._sums.all_reduce(x if x.dim() == 2 else x.sum(0))
            return triton_ops.rms_norm(x, norm, residual, pdl=False), residual
        # A product of the library lets nothing start before it ends: an early launch only costs. Of few tokens and
        # columns that comes in parts.
        is_own = x.dim() == 2 and len(x) <= triton_linear.MAX_TOKENS and x.shape[1] <= _MAX_COLUMNS_IN_PARTS
        return triton_ops.rms_norm(x, norm, residual, self._pdl and is_own), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_ops.silu_mul(gate_up, self._pdl)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_ops.gelu_mul(gate_up, self._pdl)

    def rope_store(self, qkv: Tensor, places: HeadPlaces) -> Tensor:
        return triton_ops.rope_store(qkv, places, self._pdl)

    def project(
        self, stream: Tensor, pending: Tensor | None, norm: Norm, weight: Weight, bias: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        if pending is None and len(stream) == 1 and self._is_fused(weight, bias, 1):
            return stream, self._fused_linear(stream, weight, norm=norm, gated=gated)
        if isinstance(weight, QuantizedMatrix) and self._sums is None and weight.order is None:
            product = self._normed_product(stream, pending, norm, weight, bias)
            if product is not None:
                return stream, triton_ops.silu_mul(product, self._pdl) if gated else product
        normed, stream = norm_of_stream(self, stream, pending, norm)
        if (product := self._even_linear(normed, weight, bias, gated=gated)) is not None:
            return stream, product
        if self._is_fused(weight, bias, len(stream)):
            return stream, self._fused_linear(normed, weight, gated=gated)
        return stream, self._gated_linear(normed, weight, bias) if gated else self.linear(normed, weight, bias)

    def _normed_product(
        self, stream: Tensor, pending: Tensor | None, norm: Norm, matrix: QuantizedMatrix, bias: Tensor | None
    ) -> Tensor | None:
        """``project`` where tokens are rounded for the product, which the kernel of the norm does; else None."""
        x, residual = (stream, None) if pending is None else (pending, stream)
        match self._choose_product(stream, matrix):
            case Product.NARROW:
                return triton_quantized.narrow_linear(x, matrix, bias, self._pdl, norm=norm, residual=residual)
            case Product.SCALED:
                return triton_scaled.scaled_linear(x, matrix, bias, self._pdl, norm=norm, residual=residual)
            case _:
                return None

    def linear(self, y: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return self._product(y, weight, bias)
        if weight.order is not None:
            y = y.index_select(1, weight.order)
        match self._choose_product(y, weight):
            case Product.VECTOR:
                return vector_linear(y, weight, residual=bias, pdl=self._pdl)
            case Product.NARROW:
                return triton_quantized.narrow_linear(y, weight, bias, self._pdl)
            case Product.SCALED:
                return triton_scaled.scaled_linear(y, weight, bias, self._pdl)
            case Product.WIDE:
                return self._product(y, triton_quantized.dequantize(weight, y.dtype), bias)

    def _gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return triton_ops.silu_mul(self.linear(x, weight, bias), pdl=self._pdl and not isinstance(weight, Tensor))

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if (even := self._even_linear(y, weight, bias, gated=False)) is not None:
            return stream, even
        if self._is_fused(weight, bias, len(y)):
            product = self._fused_linear(y, weight, residual=None if self._sums else stream)
            return (stream, product) if self._sums else (product, None)
        if isinstance(weight, Tensor) and bias is None and (parts := num_parts(len(y), weight)) > 1:
            return stream, linear_in_parts(y, weight, parts)
        if not isinstance(weight, Tensor) and bias is None and self._choose_product(y, weight) == Product.SCALED:
            parts = triton_scaled.num_parts(len(y), weight)
            return stream, triton_scaled.scaled_linear(y, weight, None, self._pdl, parts=parts)
        return stream, self.linear(y, weight, bias)

    def experts(
        self, x: Tensor, router: Tensor, gate_up: Stack, down: Stack, per_token: int, normalized: bool, slots: Tensor
    ) -> Tensor:
        if self._experts:
            return self._experts.experts(x, router, gate_up, down, per_token, normalized, slots)
        bits = gate_up.form.bits if isinstance(gate_up, QuantizedMatrix) else 16
        tiles = self._tiles(x, per_token, len(router), bits)
        routing = triton_experts.route(self.logits(x, router), slots, per_token, normalized, tiles, self._pdl)
        return triton_experts.experts(x, gate_up, down, routing, tiles, self._pdl)

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        out = empty_logits(hidden, weight) if out is None else out
        if self._is_fused(weight, None, len(hidden)):
            return self._fused_linear(hidden, weight, out=out)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)

    def _tiles(self, x: Tensor, per_token: int, num_experts: int, bits: int) -> triton_experts.Tiles | None:
        """``bits``: of a weight."""
        shared_bytes = torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor
        return triton_experts.choose_tiles(
            len(x), per_token, num_experts, shared_bytes, bits, has_scaled=self._multiplies_fp8
        )

    def _is_fused(self, weight: Weight, bias: Tensor | None, num_tokens: int) -> bool:
        if isinstance(weight, Tensor):
            return bias is None and triton_linear.is_fused(num_tokens, weight)
        product = choose_product(num_tokens, weight.form, weight.shape, has_scaled=False)
        return bias is None and weight.order is None and product == Product.VECTOR

    def _even_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, *, gated: bool) -> Tensor | None:
        if self._even is None or bias is not None or not isinstance(weight, Tensor):
            return None
        tile = choose_tile(len(x), len(weight) // (2 if gated else 1), weight.shape[1], gated)
        return None if tile is None else self._even.linear(x, weight, tile, gated=gated)

    def _fused_linear(self, x: Tensor, weight: Weight, **options: Any) -> Tensor:
        if isinstance(weight, Tensor):
            return triton_linear.fused_linear(x, weight, pdl=self._pdl, **options)
        return vector_linear(x, weight, pdl=self._pdl, **options)

    def _choose_product(self, y: Tensor, matrix: QuantizedMatrix) -> Product:
        has_scaled = self._multiplies_fp8 and y.dtype == torch.bfloat16  # the only type of its results
        return choose_product(len(y), matrix.form, matrix.shape, has_scaled=has_scaled)


def empty_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 [S, vocab]."""
    return torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)


def num_parts(num_tokens: int, weight: Tensor) -> int:
    """Into how many parts a product that adds to the stream is cut along its inner dimension, so that its few columns
    keep all multiprocessors busy; as measured on an H200. The norm that follows sums them up."""
    out_features, in_features = weight.shape
    if num_tokens > _MAX_TOKENS_IN_PARTS or out_features > _MAX_COLUMNS_IN_PARTS or in_features % 256:
        return 1
    return 4 if num_tokens <= 64 or out_features <= 1024 else 2


def linear_in_parts(y: Tensor, weight: Tensor, parts: int) -> Tensor:
    """y [T, in] @ weight[out, in].T as parts [P, T, out] whose sum it is."""
    y_parts = y.view(y.shape[0], parts, -1).transpose(0, 1)
    return torch.bmm(y_parts, weight.view(weight.shape[0], parts, -1).permute(1, 2, 0))
