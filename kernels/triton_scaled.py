"""Products of matrices in e4m3 with tokens that are rounded to e4m3 too, on the tensor cores for that: the vendor's
library where a scale is for a whole row and token, and a kernel where scales are for blocks of both, or where so few
tokens meet so few rows that the inner dimension is cut into parts.

Tensor cores sum up a block of columns, and its sums get their scales on the way to those of fp32 (as DeepGEMM has it).
This must not take longer than the products: so tokens are the left factor where they are many, a thread holds few of
them, and a block of the matrix has a single scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.interface import Norm
from radixserve.kernels.quantized import QuantizedMatrix
from radixserve.kernels.triton_linear import Tile, prefetch_first
from radixserve.kernels.triton_rounding import round_tokens

_MOST_RIGHT = 64  # tokens that are the right factor
_MULTIPROCESSORS = 132  # of an H200
_MOST_IN_PARTS, _MOST_PARTS, _MIN_COLUMNS = 256, 4, 1024  # tokens, parts, and columns of one
_WALKING = 8  # tiles of tokens that go over the matrix together, so that they find it in the L2 cache


@triton.jit(do_not_specialize=["T"])
def _matmul(
    x_ptr,  # e4m3 [T, K]
    x_scale_ptr,  # fp32 [groups, T]
    weight_ptr,  # e4m3 [N, K]
    scale_ptr,  # fp32 [N, groups]
    bias_ptr,  # [N] if BIAS
    out_ptr,  # [parts, T, N]
    T,
    N,
    K,  # a multiple of DEPTH
    DEPTH: tl.constexpr,
    GROUPED: tl.constexpr,  # groups are of DEPTH columns; else there is one for each row
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LEFT: tl.constexpr,  # tokens are the left factor, of 64 rows at least
    BLOCKED: tl.constexpr,  # the BLOCK_N rows have the same scales
    WALKING: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    steps, part = tl.cdiv(K // DEPTH, tl.num_programs(1)), tl.program_id(1)
    tiles_t, tiles_n = tl.cdiv(T, BLOCK_T), tl.cdiv(N, BLOCK_N)
    first_t = tl.program_id(0) // (WALKING * tiles_n) * WALKING
    within, walking = tl.program_id(0) % (WALKING * tiles_n), tl.minimum(tiles_t - first_t, WALKING)
    t = (first_t + within % walking) * BLOCK_T + tl.arange(0, BLOCK_T)
    first_n = within // walking * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    row, there, k, groups = tl.minimum(n, N - 1), t < T, tl.arange(0, DEPTH), K // DEPTH if GROUPED else 1
    row_ptrs = weight_ptr + row.to(tl.int64)[:, None] * K
    weight_ptrs = row_ptrs + k[None, :]
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * K + k[None, :]
    scale_ptrs = scale_ptr + (first_n if BLOCKED else row) * groups
    acc = tl.zeros([BLOCK_T, BLOCK_N] if LEFT else [BLOCK_N, BLOCK_T], tl.float32)
    if PDL:
        prefetch_first(row_ptrs, part * steps * DEPTH, K)
        gdc_launch_dependents()
        gdc_wait()
    # Scales are loaded a step ahead: the products wait for nothing but their factors.
    group = tl.minimum(part * steps, groups - 1)
    scale, x_scale = tl.load(scale_ptrs + group), tl.load(x_scale_ptr + group * T + t, mask=there, other=0.0)
    for step in range(part * steps, tl.minimum((part + 1) * steps, K // DEPTH)):
        weight = tl.load(weight_ptrs + step * DEPTH)
        x = tl.load(x_ptrs + step * DEPTH, mask=there[:, None], other=0.0)
        if GROUPED:
            group = tl.minimum(step + 1, groups - 1)
            next_scale = tl.load(scale_ptrs + group)
            next_x_scale = tl.load(x_scale_ptr + group * T + t, mask=there, other=0.0)
            acc += _scaled(_product(x, weight, LEFT), x_scale, scale, LEFT, BLOCKED)
            scale, x_scale = next_scale, next_x_scale
        else:
            acc += _product(x, weight, LEFT)
    if not GROUPED:
        acc = _scaled(acc, x_scale, scale, LEFT, BLOCKED)
    if not LEFT:
        acc = tl.trans(acc)
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (part * T + t).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & (n < N)[None, :])


@triton.jit
def _product(x, weight, LEFT: tl.constexpr):
    """A sum of its own, as those of the tensor cores have 14 bits (DeepSeek-V3's report): they must not go on."""
    return tl.dot(x, tl.trans(weight)) if LEFT else tl.dot(weight, tl.trans(x))


@triton.jit
def _scaled(product, x_scale, scale, LEFT: tl.constexpr, BLOCKED: tl.constexpr):
    if BLOCKED:
        x_scale *= scale
    else:
        product *= scale[None, :] if LEFT else scale[:, None]
    return product * (x_scale[:, None] if LEFT else x_scale[None, :])


def scaled_linear(
    x: Tensor,
    matrix: QuantizedMatrix,
    bias: Tensor | None,
    pdl: bool,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """x [T, K], its columns as those of ``matrix`` [N, K] in e4m3 lie, @ matrix.T (+ bias): [T, N], or without a bias
    in ``parts`` [P, T, N]. x is rounded to e4m3 with a scale for each token or, where the matrix has groups, for each
    group of its columns. ``norm`` and ``residual`` as of ``round_tokens``."""
    narrow, scales = round_tokens(x, matrix.form.group, pdl, norm, residual)
    if matrix.form.group is not None or parts > 1:
        return multiply_scaled(narrow, scales, matrix, bias, x.dtype, pdl, parts=parts)
    product = torch._scaled_mm(narrow, matrix.values.t(), scales.t(), matrix.scales.t(), out_dtype=x.dtype)
    return product if bias is None else product.add_(bias)


def multiply_scaled(
    x: Tensor,
    scales: Tensor,
    matrix: QuantizedMatrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    pdl: bool,
    tile: Tile | None = None,
    parts: int = 1,
) -> Tensor:
    """x e4m3 [T, K], its ``scales`` [K / group, T] for the groups of ``matrix`` [N, K], @ matrix.T (+ bias): [T, N] or,
    without a bias, in parts [P, T, N]. Tile: of tokens and matrix."""
    (t, k), n, form = x.shape, matrix.shape[0], matrix.form
    assert parts == 1 or bias is None
    out = torch.empty(parts, t, n, dtype=dtype, device=x.device)
    tile = tile or _scaled_tile(t, n)
    _matmul[(triton.cdiv(t, tile.rows) * triton.cdiv(n, tile.columns), parts)](
        x,
        scales,
        matrix.values,
        matrix.scales,
        x if bias is None else bias,
        out,
        t,
        n,
        k,
        DEPTH=form.group or _depth(k),
        GROUPED=form.group is not None,
        BLOCK_N=tile.columns,
        BLOCK_T=tile.rows,
        LEFT=t > _MOST_RIGHT,
        BLOCKED=form.height % tile.columns == 0,
        WALKING=_WALKING,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl,
    )
    return out if parts > 1 else out[0]


def num_parts(tokens: int, matrix: QuantizedMatrix) -> int:
    """Into how many parts a product that adds to the stream is cut, so that its few rows keep all multiprocessors busy;
    the norm that follows sums them up."""
    tile, (rows, columns) = _scaled_tile(tokens, matrix.shape[0]), matrix.shape
    tiles = triton.cdiv(tokens, tile.rows) * triton.cdiv(rows, tile.columns)
    if tokens > _MOST_IN_PARTS:
        return 1
    parts: int = max(1, min(2 * _MULTIPROCESSORS // tiles, columns // _MIN_COLUMNS, _MOST_PARTS))
    return 1 << (parts.bit_length() - 1)


def _depth(columns: int) -> int:
    return next(depth for depth in (128, 64, 32, 16) if columns % depth == 0)


def _scaled_tile(tokens: int, rows: int) -> Tile:
    """As measured on an H200. A multiprocessor holds two programs with four stages or three with three: these are
    faster by an eighth, where they do not leave more multiprocessors idle in the end."""
    if tokens <= _MOST_RIGHT:
        return Tile(max(16, triton.next_power_of_2(tokens)), 64, 128, 4, 4)
    tiles = triton.cdiv(tokens, 64) * triton.cdiv(rows, 128)
    two, three = (held * triton.cdiv(tiles, held * _MULTIPROCESSORS) for held in (2, 3))
    return Tile(64, 128, 128, 3 if three * 7 / 8 < two else 4, 4)
