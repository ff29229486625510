"""``invariant`` for CUDA: results that depend on a token and those before it only.

A library chooses how to sum a product by its number of rows. Here every product goes through the inner dimension in
one order, 16 columns at a time, whatever tiles it is made of. Attention likewise goes through a sequence's keys in
blocks that begin at the same positions for every query, whether that is decoded, is part of a chunk, or follows a
cached prefix; keys that a query does not see weigh exactly 0. So the same kernels serve steps with and without graphs.
(The idea: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.)
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.kernels.cuda_ops import CudaOps, empty_logits
from radixserve.kernels.interface import AttentionShape, BatchLayout, Weight
from radixserve.kernels.quantized import Product, QuantizedMatrix
from radixserve.kernels.triton_experts import Tiles
from radixserve.kernels.triton_extend import TritonExtendAttention
from radixserve.kernels.triton_linear import Tile, tiled_linear

# For up to so many rows, where all of them give the same bits; else there is one for all.
_TILE = Tile(64, 32, 128, 4, 4)
_TILES = {16: Tile(16, 16, 512, 4, 2), 64: _TILE, 1 << 31: Tile(128, 128, 64, 4, 8)}
_DEPTHS = (512, 256, 128, 64)
_EXPERT_TILES = Tiles(Tile(32, 32, 128, 4, 4), Tile(32, 64, 128, 4, 4))


class InvariantCudaOps(CudaOps):
    """Products by ``tiled_linear``, whatever the number of rows; all else is done row by row anyway."""

    def _is_fused(self, weight: Weight, bias: Tensor | None, num_tokens: int) -> bool:
        return False

    def _product(self, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = _tiled(y, weight, pdl=self._pdl)
        return product if bias is None else product.add_(bias)

    def _gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Tensor) and bias is None:
            return _tiled(x, weight, gated=True, pdl=self._pdl)
        return self.silu_mul(self.linear(x, weight, bias))

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(weight, Tensor) and bias is None:
            return _tiled(y, weight, residual=stream, pdl=self._pdl), None
        return stream, self.linear(y, weight, bias)

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return _tiled(hidden, weight, out=empty_logits(hidden, weight) if out is None else out, pdl=self._pdl)

    def _choose_product(self, y: Tensor, matrix: QuantizedMatrix) -> Product:
        return Product.WIDE

    def _tiles(self, x: Tensor, per_token: int, num_experts: int, bits: int) -> Tiles:
        return _EXPERT_TILES


@cache
def _sums_alike(device: torch.device) -> bool:
    """Whether the tensor cores sum up alike whatever instructions a tile is compiled to. Up to compute capability 8.9
    there is one kind; on an H200 the two kinds were compared (and are, by a test)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) <= (9, 0)


def _tiled(y: Tensor, weight: Tensor, *, gated: bool = False, **options: Any) -> Tensor:
    """``tiled_linear`` with the tile for so many rows."""
    if missing := -y.shape[1] % _DEPTHS[-1]:  # the inner sizes of models are multiples of it
        y, weight = F.pad(y, (0, missing)), F.pad(weight, (0, missing))
    tile = next(tile for rows, tile in _TILES.items() if len(y) <= rows) if _sums_alike(y.device) else _TILE
    depth = next(size for size in _DEPTHS if size <= tile.depth and y.shape[1] % size == 0)
    columns = tile.columns // 2 if gated else tile.columns  # the same number of weights
    return tiled_linear(y, weight, tile._replace(columns=columns, depth=depth), gated=gated, **options)


class InvariantCudaAttention:
    """``AttentionKernel``: decodes are chunks of one token, for steps of up to ``max_seqs`` sequences. The keys of a
    sequence are not shared out over blocks, so a few long contexts take longer than with ``SplitAttention``."""

    plans_on_device = True
    shared_prefixes = None

    def __init__(self, shape: AttentionShape, max_seqs: int, device: torch.device, pdl: bool):
        self._kernel = TritonExtendAttention(shape, pdl)
        self._one_token_each = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)

    def plan(self, layout: BatchLayout) -> None:
        count = layout.num_decodes
        self._layout = layout
        self._decodes = replace(
            layout,
            num_decodes=0,
            rows=layout.rows[:count],
            kv_lens=layout.kv_lens[:count],
            query_starts=self._one_token_each[: count + 1],
        )

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> Tensor:
        out = torch.empty_like(q)
        count = self._layout.num_decodes
        if count:
            self._kernel.run(self._decodes, q[:count], k_cache, v_cache, out[:count], window)
        if self._layout.rows.shape[0] > count:
            # After the decodes, since it takes back the rows in which their padding has left zeros.
            self._kernel.run(self._layout, q, k_cache, v_cache, out, window)
        return out
