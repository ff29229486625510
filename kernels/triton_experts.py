"""A mixture of experts on CUDA: routing, and each token's products with the weights of the experts it goes to.

Nothing here asks the device for a number, and all shapes follow from the number of tokens, so a CUDA graph may hold it.
A *pair* is a token with one of its experts. The pairs of an expert stand together, cut into blocks of some rows; a
program multiplies a block with some of the expert's columns (the grouped product of MegaBlocks, Gale et al. 2022, and
of vLLM). Up to ``_MOST_BY_PAIR`` tokens, hardly two of which go to the same expert, need no blocks: they are multiplied
pair by pair (``triton_quantized_vector``). The answers of a token's experts are left apart, in the order of its choice,
for the norm that follows to sum up; so results do not depend on timing.

Quantized weights are widened on the way, e4m3 only where the device does not multiply it: else it meets rows that are
rounded to e4m3 too, each with a scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from radixserve.kernels import triton_experts_kernels as kernels
from radixserve.kernels.quantized import UNIT, QuantizedMatrix, Stack
from radixserve.kernels.triton_linear import Tile
from radixserve.kernels.triton_quantized_vector import vector_experts
from radixserve.kernels.triton_rounding import round_tokens

_MOST_BY_PAIR = 8
_LARGE_TILE_BYTES = 147_456  # of shared memory; the others take up to 98,304, which all devices have
_TABLE = 4096  # rows times experts that a program of the routing holds


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of both products; their rows are the same. ``group``: blocks of rows that walk together over the columns.
    ``scaled``: rows are rounded to e4m3."""

    gate_up: Tile
    down: Tile
    group: int = 1
    scaled: bool = False


def choose_tiles(
    num_tokens: int, per_token: int, num_experts: int, shared_bytes: int, bits: int = 16, *, has_scaled: bool = False
) -> Tiles | None:
    """By the pairs of an expert, as measured on an H200 with the shape of Qwen3-30B-A3B (4 bits: by what fits into
    registers, not measured); None: pair by pair.
    ``shared_bytes``: of a multiprocessor; ``bits``: of a weight; ``has_scaled``: whether the device multiplies e4m3."""
    share = num_tokens * per_token / num_experts
    if num_tokens <= _MOST_BY_PAIR:
        return None
    if bits == 4:
        rows = 16 if share <= 8 else 32 if share <= 24 else 64
        return Tiles(Tile(rows, 128 if rows == 16 else 64, 128, 4, 4), Tile(rows, 128, 128, 4, 4), group=rows // 8)
    if bits == 8:
        return _e4m3_tiles(share, scaled=has_scaled)
    if 2 < share <= 8:
        return Tiles(Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4))
    if share <= 128 or shared_bytes < _LARGE_TILE_BYTES:
        return Tiles(Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4), group=8)
    return Tiles(Tile(128, 128, 64, 3, 8), Tile(128, 128, 64, 4, 8), group=8)


def _e4m3_tiles(share: float, *, scaled: bool) -> Tiles:
    if share <= 8 and not scaled:
        return Tiles(Tile(16, 32, 128, 5, 4), Tile(16, 64, 128, 4, 4))
    if share <= 24 and not scaled:
        return Tiles(Tile(32, 64, 128, 4, 4), Tile(32, 128, 128, 4, 4))
    return Tiles(Tile(64, 64, 128, 3, 4), Tile(64, 128, 128, 3, 4), group=8, scaled=scaled)


@dataclass(frozen=True, slots=True)
class Routing:
    """Where tokens go. ``weights`` fp32 and ``chosen`` int32, [T, k]; ``pairs`` and ``blocks`` as ``kernels.sort``
    leaves them, None for a few tokens, which are multiplied pair by pair."""

    num_experts: int
    weights: Tensor
    chosen: Tensor
    pairs: Tensor | None = None
    blocks: Tensor | None = None


def route(
    scores: Tensor,  # fp32 [T, E]
    slots: Tensor,  # int64 [T], below 0 for tokens of nobody, who go nowhere
    per_token: int,
    normalized: bool,
    tiles: Tiles | None,
    pdl: bool = True,
) -> Routing:
    """Softmax over the experts, the best ``per_token`` of each token, and its pairs in blocks, if there are tiles."""
    num_tokens, num_experts = scores.shape
    num_pairs, width = num_tokens * per_token, triton.next_power_of_2(num_experts)
    rows = max(1, min(32, _TABLE // width)) if tiles else 1
    pieces = triton.cdiv(num_tokens, rows)
    weights = torch.empty(num_tokens, per_token, dtype=torch.float32, device=scores.device)
    chosen = torch.empty(num_tokens, per_token, dtype=torch.int32, device=scores.device)
    counts = chosen.new_empty(pieces, width) if tiles else chosen
    kernels.route[(pieces,)](
        scores,
        slots,
        weights,
        chosen,
        counts,
        num_tokens,
        EXPERTS=num_experts,
        WIDTH=width,
        TOP=per_token,
        TOP_WIDTH=triton.next_power_of_2(per_token),
        ROWS=rows,
        NORMALIZED=normalized,
        COUNT=tiles is not None,
        PDL=pdl,
        num_warps=8 if tiles else 1,
        launch_pdl=pdl,
    )
    if tiles is None:
        return Routing(num_experts, weights, chosen)
    block_rows = tiles.gate_up.rows
    used = min(num_pairs, num_experts)
    max_blocks = used + (num_pairs - used) // block_rows  # every expert may leave its last block partly empty
    pairs, blocks = chosen.new_empty(num_pairs), chosen.new_empty(3, max_blocks)
    kernels.sort[(pieces,)](
        chosen,
        counts,
        pairs,
        blocks,
        num_tokens,
        pieces,
        max_blocks,
        WIDTH=width,
        TOP=per_token,
        ROWS=rows,
        BLOCK_ROWS=block_rows,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return Routing(num_experts, weights, chosen, pairs, blocks)


def experts(
    x: Tensor,  # [T, H]
    gate_up: Stack,  # [E, 2 I, H]
    down: Stack,  # [E, H, I]
    routing: Routing,
    tiles: Tiles | None,  # as of ``route``
    pdl: bool = True,
) -> Tensor:
    """Weighted answers [k, T, H], whose sum over k is the mixture's; those of tokens of nobody are anything."""
    num_tokens, hidden = x.shape
    per_token, inner_size = routing.chosen.shape[1], down.shape[-1]
    if tiles is None:
        places = (routing.num_experts, routing.chosen, routing.weights)
        inner = vector_experts(x, gate_up, *places, gated=True, pdl=pdl)
        return vector_experts(inner, down, *places, gated=False, pdl=pdl)
    inner = x.new_empty(num_tokens * per_token, inner_size)
    _launch(x, gate_up, inner, routing, tiles, gated=True, pdl=pdl)
    answers = x.new_empty(per_token, num_tokens, hidden)
    _launch(inner, down, answers, routing, tiles, gated=False, pdl=pdl)
    return answers


def _launch(x: Tensor, weight: Stack, out: Tensor, routing: Routing, tiles: Tiles, *, gated: bool, pdl: bool) -> None:
    assert routing.pairs is not None and routing.blocks is not None
    (num_tokens, per_token), (tile, group) = routing.chosen.shape, (tiles.gate_up if gated else tiles.down, tiles.group)
    inner, columns, max_blocks = x.shape[1], out.shape[-1], routing.blocks.shape[1]
    matrix, stored = (weight, weight.values) if isinstance(weight, QuantizedMatrix) else (None, weight)
    depth = _depth(tile, inner, matrix)
    words = (4, depth) if matrix is not None and matrix.form.bits == 4 else None
    x, x_scales = round_tokens(x, None, pdl, words=words) if tiles.scaled or words else (x, routing.weights)
    scales = routing.weights if matrix is None else matrix.scales
    kernels.multiply[(triton.cdiv(max_blocks, group) * group * triton.cdiv(columns, tile.columns),)](
        x,
        x_scales,
        stored.view(torch.int16) if words else stored,
        scales,
        scales if matrix is None or matrix.zeros is None else matrix.zeros,
        routing.weights,
        routing.pairs,
        routing.blocks,
        out,
        num_tokens,
        max_blocks,
        columns,
        inner,
        TOP=per_token,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=depth,
        STAGES=tile.stages,
        GROUP=group,
        BITS=16 if matrix is None else matrix.form.bits,
        GROUPED=matrix is not None and matrix.form.group is not None,
        BLOCKED=matrix is not None and matrix.form.height % tile.columns == 0,
        X_SCALED=tiles.scaled or words is not None,
        GATED=gated,
        WHOLE=inner % depth == 0,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )


def _depth(tile: Tile, inner: int, matrix: QuantizedMatrix | None) -> int:
    """As the tile says, if groups of columns and their number allow it; sums of quantized weights have no rest."""
    if matrix is not None and matrix.form.group is not None:
        return matrix.form.group
    depth: int = min(tile.depth, max(16, triton.next_power_of_2(inner)))
    least = 64 if matrix is None else UNIT
    while depth > least and inner % depth:
        depth //= 2
    return depth
