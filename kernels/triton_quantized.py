"""Products of matrices of 8 and 4 bits a weight on CUDA, see ``quantized.py`` for how they lie.

Few tokens: ``narrow_linear`` reads the narrow weights and multiplies them with the activations as they are, on tensor
cores; what a weight stands for without its scale is exact in 16 bits, and scales come to the sums of each group. Many:
``scaled_linear`` rounds each token to e4m3 and leaves the rest to the library, or ``dequantize`` writes the matrix out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.quantized import FP8, FP8_MAX, SMALLEST_SCALE, UNIT, QuantizedMatrix

_HALF_UNIT = UNIT // 2


@triton.jit(do_not_specialize=["M"])
def _matmul(
    x_ptr,  # [M, K]
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
    x_ptrs = x_ptr + tl.minimum(m, M - 1)[:, None] * K + column[None, :]
    weight_ptrs = weight_ptr + row[:, None] * (K * BITS // 8) + lane[None, :]
    groups = K // DEPTH if GROUPED else 1
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        weight = tl.load(weight_ptrs + start * BITS // 8)
        x = tl.load(x_ptrs + start)
        if BITS == 8:
            part = tl.dot(x, tl.trans(weight.to(x.dtype)))
        else:
            zero = tl.load(zero_ptr + row * groups + start // DEPTH)[:, None]
            part = tl.dot(x, tl.trans(((weight & 15) - zero).to(x.dtype)))
            high = (((weight >> 4) & 15) - zero).to(x.dtype)
            part = tl.dot(tl.load(x_ptrs + start + HALF), tl.trans(high), part)
        acc += part * tl.load(scale_ptr + row * groups + start // DEPTH)[None, :] if GROUPED else part
    if not GROUPED:
        acc *= tl.load(scale_ptr + row)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None].to(tl.int64) * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_tokens(
    x_ptr,  # [T, SIZE]
    out_ptr,  # e4m3, as x
    scale_ptr,  # fp32 [T]
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, SMALLEST)
    rounded = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * SIZE + at, rounded, mask=at < SIZE)
    tl.store(scale_ptr + token, scale)


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


def narrow_linear(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, pdl: bool) -> Tensor:
    """x [M, K], its columns as those of ``matrix`` [N, K] lie, @ matrix.T (+ bias): [M, N]."""
    (m, k), n, form = x.shape, matrix.shape[0], matrix.form
    out = x.new_empty(m, n)
    rows = 16 if m <= 16 else 32 if m <= 32 else 64
    columns = 64 if rows == 64 else 16 if n < 8192 else 32
    depths = (128, 64, 32, 16) if rows == 64 else (256, 128, 64, 32, 16)  # as much as shared memory holds several of
    depth = form.group or next(size for size in depths if k % size == 0)
    _matmul[(triton.cdiv(m, rows), triton.cdiv(n, columns))](
        x,
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
        STAGES=4,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def scaled_linear(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, pdl: bool) -> Tensor:
    """As ``narrow_linear``, for e4m3 with a scale for each row; x is rounded to e4m3, each token with a scale of its
    own."""
    narrow, scales = quantize_tokens(x, pdl)
    product = torch._scaled_mm(narrow, matrix.values.t(), scales, matrix.scales.t(), out_dtype=x.dtype)
    return product if bias is None else product.add_(bias)


def quantize_tokens(x: Tensor, pdl: bool) -> tuple[Tensor, Tensor]:
    """x [T, K] in e4m3, and the scale of each token, fp32 [T, 1]."""
    tokens, size = x.shape
    narrow, scales = torch.empty_like(x, dtype=FP8), torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_tokens[(tokens,)](
        x,
        narrow,
        scales,
        LARGEST=FP8_MAX,
        SMALLEST=SMALLEST_SCALE,
        SIZE=size,
        BLOCK=block,
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
