"""Products of matrices of 8 and 4 bits a weight on CUDA, see ``quantized.py`` for how they lie.

Few tokens: ``narrow_linear`` reads the narrow weights and multiplies them with activations of 16 bits on tensor cores;
what a weight stands for without its scale is exact in fp16, and scales come to the sums of each group.
``scaled_linear`` rounds tokens to e4m3, with a scale for each or for each of its groups, and multiplies on the units
for that. Many: ``dequantize`` writes the matrix out. One token: ``triton_quantized_vector``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.quantized import FP8, FP8_MAX, SMALLEST_SCALE, UNIT, QuantizedMatrix
from radixserve.kernels.triton_linear import Tile

_HALF_UNIT = UNIT // 2
_LARGEST_FP16 = 32768.0


@triton.jit(do_not_specialize=["M"])
def _matmul(
    x_ptr,  # fp16 [M, K]
    x_scale_ptr,  # fp32 [M]
    weight_ptr,  # e4m3 [N, K] or int8 [N, K / 2]
    scale_ptr,  # fp32 [N, groups]
    zero_ptr,  # int8 [N, groups], of 4 bits
    bias_ptr,  # [N] if BIAS
    out_ptr,  # [M, N]
    M,
    N,
    K,  # a multiple of DEPTH
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,  # groups are of DEPTH columns; else there is one for each row
    HALF: tl.constexpr,  # columns of 4 bits that lie beside each other
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    lane = tl.arange(0, DEPTH * BITS // 8)
    column = lane if BITS == 8 else lane // HALF * (2 * HALF) + lane % HALF
    there = m < M
    x_ptrs = x_ptr + m[:, None] * K + column[None, :]
    weight_ptrs = weight_ptr + row[:, None] * (K * BITS // 8) + lane[None, :]
    groups = K // DEPTH if GROUPED else 1
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        weight = tl.load(weight_ptrs + start * BITS // 8)
        x = tl.load(x_ptrs + start, mask=there[:, None], other=0.0)
        if BITS == 8:
            part = tl.dot(x, tl.trans(weight.to(x.dtype)))
        else:
            zero = tl.load(zero_ptr + row * groups + start // DEPTH)[:, None]
            part = tl.dot(x, tl.trans(((weight & 15) - zero).to(x.dtype)))
            high = (((weight >> 4) & 15) - zero).to(x.dtype)
            x = tl.load(x_ptrs + start + HALF, mask=there[:, None], other=0.0)
            part = tl.dot(x, tl.trans(high), part)
        acc += part * tl.load(scale_ptr + row * groups + start // DEPTH)[None, :] if GROUPED else part
    if not GROUPED:
        acc *= tl.load(scale_ptr + row)[None, :]
    acc *= tl.load(x_scale_ptr + m, mask=there, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    inside = there[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None].to(tl.int64) * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _scaled_matmul(
    x_ptr,  # e4m3 [T, K]
    x_scale_ptr,  # fp32 [T, K / DEPTH]
    weight_ptr,  # e4m3 [N, K]
    scale_ptr,  # fp32 [N, K / DEPTH]
    bias_ptr,  # [N] if BIAS
    out_ptr,  # [T, N]
    T,
    N,
    K,  # a multiple of DEPTH
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weights are the left factor, as that has 64 rows at least; the right one may be as narrow as 16 tokens."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    row, token, there = tl.minimum(n, N - 1).to(tl.int64), t.to(tl.int64), t < T
    k = tl.arange(0, DEPTH)
    weight_ptrs = weight_ptr + row[:, None] * K + k[None, :]
    x_ptrs = x_ptr + token[:, None] * K + k[None, :]
    groups = K // DEPTH
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for group in tl.range(0, groups, num_stages=STAGES):
        weight = tl.load(weight_ptrs + group * DEPTH)
        x = tl.load(x_ptrs + group * DEPTH, mask=there[:, None], other=0.0)
        scale = tl.load(scale_ptr + row * groups + group)
        x_scale = tl.load(x_scale_ptr + token * groups + group, mask=there, other=0.0)
        acc += tl.dot(weight, tl.trans(x)) * scale[:, None] * x_scale[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    inside = there[:, None] & (n < N)[None, :]
    spot = t[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out_ptr + spot, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _round_tokens(
    x_ptr,  # [T, SIZE]
    out_ptr,  # e4m3 or fp16, as x
    scale_ptr,  # fp32 [T, SIZE / GROUP]
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, as BLOCK: GROUPS groups of BLOCK columns, or what there is of them
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, group, at = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    there = group < SIZE // GROUP
    spot = token * SIZE + group[:, None] * GROUP + at[None, :]
    inside = there[:, None] & (at < GROUP)[None, :]
    x = tl.load(x_ptr + spot, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / LARGEST, SMALLEST)
    rounded = tl.minimum(tl.maximum(x / scale[:, None], -LARGEST), LARGEST)
    tl.store(out_ptr + spot, rounded.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + token * (SIZE // GROUP) + group, scale, mask=there)


@triton.jit
def _dequantize(
    weight_ptr,  # as of ``_matmul``
    scale_ptr,
    zero_ptr,
    out_ptr,  # [N, K]
    K,
    group,  # columns
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < K
    spot = row * (K // group) + column // group
    scale = tl.load(scale_ptr + spot, mask=inside, other=0.0)
    if BITS == 8:
        value = tl.load(weight_ptr + row * K + column, mask=inside, other=0.0).to(tl.float32)
    else:
        byte = column // (2 * HALF) * HALF + column % HALF
        weight = tl.load(weight_ptr + row * (K // 2) + byte, mask=inside, other=0)
        nibble = tl.where(column // HALF % 2 == 0, weight, weight >> 4) & 15
        value = (nibble - tl.load(zero_ptr + spot, mask=inside, other=0)).to(tl.float32)
    tl.store(out_ptr + row * K + column, (value * scale).to(out_ptr.dtype.element_ty), mask=inside)


def narrow_linear(
    x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, pdl: bool, tile: Tile | None = None
) -> Tensor:
    """x [M, K], its columns as those of ``matrix`` [N, K] lie, @ matrix.T (+ bias): [M, N]."""
    (m, k), n, form = x.shape, matrix.shape[0], matrix.form
    out = x.new_empty(m, n)
    rows, columns, depth, stages, warps = tile or _narrow_tile(m, n)
    depth = form.group or next(size for size in (512, 256, 128, 64, 32, 16) if k % size == 0 and size <= depth)
    x, x_scales = round_tokens(x, None, pdl, torch.float16)  # what e4m3 and integers become in the fewest instructions
    _matmul[(triton.cdiv(m, rows), triton.cdiv(n, columns))](
        x,
        x_scales,
        matrix.values,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        x if bias is None else bias,
        out,
        m,
        n,
        k,
        BITS=form.bits,
        GROUPED=form.group is not None,
        HALF=_HALF_UNIT,
        DEPTH=depth,
        BLOCK_M=rows,
        BLOCK_N=columns,
        STAGES=stages,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out


def _narrow_tile(tokens: int, out_features: int) -> Tile:
    """Estimated, not measured."""
    if tokens <= 16:
        return Tile(16, 16 if out_features < 8192 else 32, 256, 4, 4)
    return Tile(32, 32, 256, 4, 4) if tokens <= 32 else Tile(64, 64, 128, 4, 4)


def scaled_linear(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, pdl: bool) -> Tensor:
    """As ``narrow_linear``, for e4m3; x is rounded to e4m3 with a scale for each token or, where the matrix has groups,
    for each group of its columns."""
    narrow, scales = round_tokens(x, matrix.form.group, pdl)
    if matrix.form.group is not None:
        return multiply_scaled(narrow, scales, matrix, bias, x.dtype, pdl)
    product = torch._scaled_mm(narrow, matrix.values.t(), scales, matrix.scales.t(), out_dtype=x.dtype)
    return product if bias is None else product.add_(bias)


def multiply_scaled(
    x: Tensor, scales: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, dtype: torch.dtype, pdl: bool
) -> Tensor:
    """x e4m3 [T, K], its ``scales`` [T, K / group] for the groups of ``matrix`` [N, K], @ matrix.T (+ bias): [T, N]."""
    (t, k), n, group = x.shape, matrix.shape[0], matrix.form.group
    out = torch.empty(t, n, dtype=dtype, device=x.device)
    tile = _scaled_tile(t)
    _scaled_matmul[(triton.cdiv(n, tile.columns), triton.cdiv(t, tile.rows))](
        x,
        scales,
        matrix.values,
        matrix.scales,
        x if bias is None else bias,
        out,
        t,
        n,
        k,
        DEPTH=group,
        BLOCK_N=tile.columns,
        BLOCK_T=tile.rows,
        STAGES=tile.stages,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
    return out


def _scaled_tile(tokens: int) -> Tile:
    """The only ones that were measured; from 64 tokens on they lose to bf16 weights."""
    if tokens <= 64:
        return Tile(max(16, triton.next_power_of_2(tokens)), 64, 128, 4, 4)
    return Tile(64, 128, 128, 4, 4) if tokens <= 128 else Tile(128, 128, 128, 4, 8)


def round_tokens(x: Tensor, group: int | None, pdl: bool, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """x [T, K] in e4m3 or fp16, and the scale of each ``group`` columns of a token, or of all: fp32 [T, K / group]."""
    tokens, size = x.shape
    group = group or size
    narrow = torch.empty_like(x, dtype=dtype)
    scales = torch.empty(tokens, size // group, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _round_tokens[(tokens,)](
        x,
        narrow,
        scales,
        LARGEST=FP8_MAX if dtype == FP8 else _LARGEST_FP16,
        SMALLEST=SMALLEST_SCALE,
        SIZE=size,
        GROUP=group,
        GROUPS=triton.next_power_of_2(size // group),
        BLOCK=triton.next_power_of_2(group),
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return narrow, scales


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """[N, K], the columns as they lie."""
    n, k = matrix.shape
    out = torch.empty(n, k, dtype=dtype, device=matrix.values.device)
    block = min(1024, triton.next_power_of_2(k))
    _dequantize[(n, triton.cdiv(k, block))](
        matrix.values,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        out,
        k,
        matrix.form.group or k,
        BITS=matrix.form.bits,
        HALF=_HALF_UNIT,
        BLOCK=block,
    )
    return out
