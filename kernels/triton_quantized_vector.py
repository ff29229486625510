"""Products of single tokens with matrices of 8 or 4 bits a weight on CUDA, with the norm before them and the activation
or residual after them, as ``_gemv`` of ``triton_linear`` has it for wide weights; and with the matrices of the experts
that a few tokens go to, wide ones too.

What counts is that nothing but the weights takes time. Each thread widens 16 bytes at once, whose products it sums by
itself: they share a scale.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.interface import Norm
from radixserve.kernels.quantized import QuantizedMatrix, Stack
from radixserve.kernels.triton_linear import finish

_BLOCK_BYTES = 16384  # of weights that a program holds
_MAX_WIDTH, _MAX_WIDTH_OF_4_BITS = 4096, 2048  # elements of a row that it reads at once; fewer: more rows that share x
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter knows no instructions


@triton.jit
def _fractions(weight):
    """Bytes of two nibbles n, the low and the high ones, as 1 + n / 16: bits of a number, without a conversion."""
    if _COMPILED:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 low, high;
            shl.b32 low, $8, 3; lop3.b32 low, low, 0x78787878, 0x80808080, 0xea;
            shr.u32 high, $8, 1; lop3.b32 high, high, 0x78787878, 0x80808080, 0xea;
            prmt.b32 $0, low, 0x3f000000, 0x7044; prmt.b32 $1, low, 0x3f000000, 0x7144;
            prmt.b32 $2, low, 0x3f000000, 0x7244; prmt.b32 $3, low, 0x3f000000, 0x7344;
            prmt.b32 $4, high, 0x3f000000, 0x7044; prmt.b32 $5, high, 0x3f000000, 0x7144;
            prmt.b32 $6, high, 0x3f000000, 0x7244; prmt.b32 $7, high, 0x3f000000, 0x7344; }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r", [weight], dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = 1 + (weight & 15).to(tl.float32) / 16
        high = 1 + ((weight >> 4) & 15).to(tl.float32) / 16
    return low, high


@triton.jit
def _dot_parts(
    weight, low, high, sums, spot, scale_ptr, zero_ptr, BITS: tl.constexpr, GROUPED: tl.constexpr, LANES: tl.constexpr
):
    """weight [BLOCK_N, BLOCK] times x: fp32 [BLOCK_N, BLOCK / LANES]. ``low``, ``high``: x at the columns of a byte's
    low and high bits; of 8 bits and more ``low`` is all. ``sums``: of x for each 16 bytes. ``spot``: of their
    scales."""
    rows: tl.constexpr = weight.shape[0]
    width: tl.constexpr = weight.shape[1]
    first, second = _fractions(weight) if BITS == 4 else (weight.to(tl.float32), 0.0)
    # One sum for each factor: then each product becomes part of an addition.
    part = tl.sum(tl.reshape(first * low[None, :], [rows, width // LANES, LANES]), 2)
    if BITS == 4:
        part += tl.sum(tl.reshape(second * high[None, :], [rows, width // LANES, LANES]), 2)
        part = 16 * part - (16 + tl.load(zero_ptr + spot).to(tl.float32)) * sums[None, :]
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
def _place_of_pair(chosen_ptr, TOP: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr):
    """The expert of this program's pair, and the rows of x and of the results that are the pair's."""
    # The gated product is the first: it waits for the routing before it lets the second one start, which therefore may
    # read the routing, and its weights, at once.
    if PDL and GATED:
        gdc_wait()
        gdc_launch_dependents()
    pair, tokens = tl.program_id(1), tl.num_programs(1) // TOP
    expert = tl.load(chosen_ptr + pair, cache_modifier=".cg")
    return expert, pair // TOP if GATED else pair, pair if GATED else pair % TOP * tokens + pair // TOP


@triton.jit
def _gemv(
    x_ptr,  # [K]; if TOP [T, K] if GATED, else [T * TOP, K]
    weight_ptr,  # [N, K], of 4 bits int8 [N, K / 2]; [2 N, ...] if GATED: first the gates; so many of each of EXPERTS
    scale_ptr,  # fp32 [N, groups], likewise
    zero_ptr,  # int8 [N, groups], of 4 bits
    norm_ptr,  # [K] if NORM
    add_ptr,  # [N] if ADD
    chosen_ptr,  # int32 [T, TOP] if TOP: experts; EXPERTS for tokens of nobody
    share_ptr,  # fp32 [T, TOP] if TOP: what results are multiplied by, unless GATED
    out_ptr,  # [N]; if TOP [T * TOP, N] if GATED, else [TOP, T, N]
    eps,
    N,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale; K: a whole row
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a row that are read at once
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    TOP: tl.constexpr,  # experts of a token, each for programs of its own; 0: there are none
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    width: tl.constexpr = K // 2 if BITS == 4 else K  # elements of a row, LANES of which are 16 bytes
    lanes: tl.constexpr = 8 if BITS == 16 else 16
    columns: tl.constexpr = 32 if BITS == 4 else lanes  # of 16 bytes
    grouped: tl.constexpr = GROUP < K
    nothing: tl.constexpr = 0 if BITS == 4 else 0.0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    lane, exists = tl.arange(0, BLOCK), n < N
    column = lane // 16 * 32 + lane % 16 if BITS == 4 else lane
    vector = tl.arange(0, BLOCK // lanes)
    inside = lane < width
    if TOP > 0:
        expert, x_row, out_row = _place_of_pair(chosen_ptr, TOP, GATED, PDL)
        row += tl.minimum(expert, EXPERTS - 1).to(tl.int64) * (N * 2 if GATED else N)
        inside, exists = inside & (expert < EXPERTS), exists & (expert < EXPERTS)
        x_ptr += x_row.to(tl.int64) * K
        out_ptr += out_row.to(tl.int64) * N
    line_ptr = weight_ptr + row[:, None] * width + lane[None, :]
    # Gated: `weight` is the up projection and `gate_weight` the gate; else `weight` is all there is.
    up_row = N.to(tl.int64) if GATED else 0
    weight = tl.load(line_ptr + up_row * width, mask=inside[None, :], other=nothing)
    gate_weight = tl.load(line_ptr, mask=inside[None, :], other=nothing) if GATED else weight
    if PDL and (TOP == 0 or not GATED):
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK // lanes], tl.float32)
    gate_acc = acc
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, width, BLOCK):
        if start > 0:
            inside = start + lane < width
            weight = tl.load(line_ptr + start + up_row * width, mask=inside[None, :], other=nothing)
            if GATED:
                gate_weight = tl.load(line_ptr + start, mask=inside[None, :], other=nothing)
        first = start * columns // lanes
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
            gate_acc += _dot_parts(gate_weight, low, high, sums, spot, scale_ptr, zero_ptr, BITS, grouped, lanes)
            spot += up_row * (K // GROUP)
        acc += _dot_parts(weight, low, high, sums, spot, scale_ptr, zero_ptr, BITS, grouped, lanes)
    value = tl.sum(acc, 1)
    gate = tl.sum(gate_acc, 1) if GATED else value
    if BITS < 16 and not grouped:
        value *= tl.load(scale_ptr + row + up_row)
        gate = gate * tl.load(scale_ptr + row) if GATED else value
    inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps) if NORM else 1.0
    value, gate = value * inverse, gate * inverse
    if TOP > 0 and not GATED:
        value *= tl.load(share_ptr + tl.program_id(1))
    finish(value, gate, add_ptr, out_ptr, n, exists, GATED, ADD)


def vector_linear(
    x: Tensor,  # [1, K], its columns as those of ``matrix`` lie
    matrix: QuantizedMatrix,  # [N, K], K a multiple of 32; [2 N, K] if gated: gate projection, then up projection
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,  # [1, N]: added
    pdl: bool = True,
    block_bytes: int = _BLOCK_BYTES,  # of weights, for a program
) -> Tensor:
    """rms_norm(x) (if ``norm``) times matrix.T, then silu(gate) * up (if ``gated``), plus ``residual``: [1, N]."""
    out = x.new_empty(1, matrix.shape[0] // (2 if gated else 1))
    return _launch(x, matrix, out, gated, pdl, block_bytes, norm=norm, residual=residual)


def vector_experts(
    x: Tensor,  # [T, K] if gated, else [T * k, K], K a multiple of 32
    stack: Stack,  # [E, N, K], or [E, 2 N, K] if gated
    num_experts: int,
    chosen: Tensor,  # int32 [T, k]: experts; E for tokens of nobody, whose results are anything
    shares: Tensor,  # fp32 [T, k]
    *,
    gated: bool,
    pdl: bool = True,
) -> Tensor:
    """Each token times the matrices of its experts: silu(gate) * up of that [T * k, N] if ``gated``, else the products
    times ``shares`` [k, T, N]."""
    (tokens, top), rows = chosen.shape, math.prod(stack.shape[:-1]) // num_experts
    out = x.new_empty(tokens * top, rows // 2) if gated else x.new_empty(top, tokens, rows)
    return _launch(x, stack, out, gated, pdl, _BLOCK_BYTES, chosen=chosen, shares=shares, num_experts=num_experts)


def _launch(
    x: Tensor,
    stack: Stack,
    out: Tensor,
    gated: bool,
    pdl: bool,
    block_bytes: int,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    chosen: Tensor | None = None,
    shares: Tensor | None = None,
    num_experts: int = 1,
) -> Tensor:
    matrix, values = (stack, stack.values) if isinstance(stack, QuantizedMatrix) else (None, stack)
    bits, group = (16, None) if matrix is None else (matrix.form.bits, matrix.form.group)
    (n, k), pairs = (out.shape[-1], x.shape[-1]), 1 if chosen is None else chosen.numel()
    width = min(triton.next_power_of_2(values.shape[-1]), _MAX_WIDTH_OF_4_BITS if bits == 4 else _MAX_WIDTH)
    block_n: int = max(1, block_bytes // (width * values.itemsize) // (2 if gated else 1))
    scales = x if matrix is None else matrix.scales
    _gemv[(triton.cdiv(n, block_n), pairs)](
        x,
        values,
        scales,
        scales if matrix is None or matrix.zeros is None else matrix.zeros,
        norm.weight if norm else x,
        x if residual is None else residual,
        x if chosen is None else chosen,
        x if shares is None else shares,
        out,
        norm.eps if norm else 0.0,
        n,
        K=k,
        BITS=bits,
        GROUP=group or k,
        BLOCK_N=block_n,
        BLOCK=width,
        NORM=norm is not None,
        GATED=gated,
        ADD=residual is not None,
        TOP=0 if chosen is None else chosen.shape[1],
        EXPERTS=num_experts,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
