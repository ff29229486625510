"""The product of one token with a matrix of 8 or 4 bits a weight on CUDA, with the norm before it and the activation or
residual after it, as ``_gemv`` of ``triton_linear`` for wide weights.

What counts is that nothing but the weights takes time. Each thread widens 16 bytes at once, whose products it sums by
itself: they share a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.interface import Norm
from radixserve.kernels.quantized import QuantizedMatrix
from radixserve.kernels.triton_linear import finish

_BLOCK_BYTES, _MAX_WIDTH = 16384, 4096


@triton.jit
def _dot_parts(weight, low, high, sums, spot, scale_ptr, zero_ptr, BITS: tl.constexpr, GROUPED: tl.constexpr):
    """weight [BLOCK_N, BLOCK] bytes times x: fp32 [BLOCK_N, BLOCK / 16]. ``low``, ``high``: x at the columns of a
    byte's low and high bits; of 8 bits ``low`` is all. ``sums``: of x for each 16 bytes. ``spot``: of their scales."""
    rows: tl.constexpr = weight.shape[0]
    width: tl.constexpr = weight.shape[1]
    if BITS == 8:
        product = weight.to(tl.float32) * low[None, :]
    else:
        product = (weight & 15).to(tl.float32) * low[None, :] + ((weight >> 4) & 15).to(tl.float32) * high[None, :]
    part = tl.sum(tl.reshape(product, [rows, width // 16, 16]), 2)
    if BITS == 4:
        part -= tl.load(zero_ptr + spot).to(tl.float32) * sums[None, :]
    return part * tl.load(scale_ptr + spot) if GROUPED else part


@triton.jit
def _load_x(x_ptrs, norm_ptrs, inside, NORM: tl.constexpr):
    """x, times the norm's weights if NORM, and its squares: fp32."""
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    squares = x * x
    if NORM:
        x *= tl.load(norm_ptrs, mask=inside, other=0.0).to(tl.float32)
    return x, squares


@triton.jit
def _gemv(
    x_ptr,  # [K]
    weight_ptr,  # e4m3 [N, K] or int8 [N, K / 2]; [2 N, ...] if GATED: first the gates
    scale_ptr,  # fp32 [N, groups], likewise
    zero_ptr,  # int8 [N, groups], of 4 bits
    norm_ptr,  # [K] if NORM
    add_ptr,  # [N] if ADD
    out_ptr,  # [N]
    eps,
    N,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale; K: a whole row
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,  # bytes of a row that are read at once
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row_bytes: tl.constexpr = K * BITS // 8
    columns: tl.constexpr = 16 * 8 // BITS  # of 16 bytes
    grouped: tl.constexpr = GROUP < K
    nothing: tl.constexpr = 0.0 if BITS == 8 else 0  # e4m3 is a kind of float
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    column = lane if BITS == 8 else lane // 16 * 32 + lane % 16
    vector = tl.arange(0, BLOCK // 16)
    line_ptr = weight_ptr + row[:, None] * row_bytes + lane[None, :]
    # Gated: `weight` is the up projection and `gate_weight` the gate; else `weight` is all there is.
    up_row = N.to(tl.int64) if GATED else 0
    inside = lane < row_bytes
    weight = tl.load(line_ptr + up_row * row_bytes, mask=inside[None, :], other=nothing)
    gate_weight = tl.load(line_ptr, mask=inside[None, :], other=nothing) if GATED else weight
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK // 16], tl.float32)
    gate_acc = acc
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, row_bytes, BLOCK):
        if start > 0:
            inside = start + lane < row_bytes
            weight = tl.load(line_ptr + start + up_row * row_bytes, mask=inside[None, :], other=nothing)
            if GATED:
                gate_weight = tl.load(line_ptr + start, mask=inside[None, :], other=nothing)
        first = start * 8 // BITS
        low, low_squares = _load_x(x_ptr + first + column, norm_ptr + first + column, inside, NORM)
        squares += low_squares
        high = low
        if BITS == 4:
            high, high_squares = _load_x(x_ptr + first + column + 16, norm_ptr + first + column + 16, inside, NORM)
            squares += high_squares
        sums = tl.sum(tl.reshape(low + high, [BLOCK // 16, 16]), 1) if BITS == 4 else vector
        group = tl.minimum(first + vector * columns, K - 1) // GROUP
        spot = row[:, None] * (K // GROUP) + group[None, :]
        if GATED:
            gate_acc += _dot_parts(gate_weight, low, high, sums, spot, scale_ptr, zero_ptr, BITS, grouped)
            spot += up_row * (K // GROUP)
        acc += _dot_parts(weight, low, high, sums, spot, scale_ptr, zero_ptr, BITS, grouped)
    value = tl.sum(acc, 1)
    gate = tl.sum(gate_acc, 1) if GATED else value
    if not grouped:
        value *= tl.load(scale_ptr + row + up_row)
        gate = gate * tl.load(scale_ptr + row) if GATED else value
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        value, gate = value * inverse, gate * inverse
    finish(value, gate, add_ptr, out_ptr, n, n < N, GATED, ADD)


def vector_linear(
    x: Tensor,  # [1, K], its columns as those of ``matrix`` lie
    matrix: QuantizedMatrix,  # [N, K], K a multiple of 32; [2 N, K] if gated: gate projection, then up projection
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,  # [1, N]: added
    pdl: bool = True,
) -> Tensor:
    """rms_norm(x) (if ``norm``) times matrix.T, then silu(gate) * up (if ``gated``), plus ``residual``: [1, N]."""
    rows, k = matrix.shape
    form, n = matrix.form, rows // (2 if gated else 1)
    out = x.new_empty(1, n)
    width = min(triton.next_power_of_2(k * form.bits // 8), _MAX_WIDTH)
    block_n = max(1, _BLOCK_BYTES // width // (2 if gated else 1) * form.bits // 8)
    _gemv[(triton.cdiv(n, block_n),)](
        x,
        matrix.values,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        norm.weight if norm else x,
        x if residual is None else residual,
        out,
        norm.eps if norm else 0.0,
        n,
        K=k,
        BITS=form.bits,
        GROUP=form.group or k,
        BLOCK_N=block_n,
        BLOCK=width,
        NORM=norm is not None,
        GATED=gated,
        ADD=residual is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
