"""Products of some tokens with matrices of 8 and 4 bits a weight on CUDA, see ``quantized.py`` for how they lie.

``narrow_linear`` reads the narrow weights, and multiplies what they stand for without their scale, which is exact in
fp16, with activations of 16 bits; scales come to the sums of each group. The weights are the left factor of the tensor
cores, which take it from registers, where it has been widened two words of 16 bits at a time (the arithmetic is that of
Kim et al. 2022, "Who Says Elephants Can't Run", and of Marlin, Frantar et al. 2024); a word holds columns that do not
lie beside each other, so tokens are written in that order when they are rounded. Matrices of few rows are cut along
the inner dimension; the block that comes last to a tile adds up the parts, in their order.

``dequantize`` writes the matrix out. One token: ``triton_quantized_vector``; activations of 8 bits: ``triton_scaled``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.interface import Norm
from radixserve.kernels.quantized import UNIT, QuantizedMatrix
from radixserve.kernels.triton_linear import Tile, prefetch_first
from radixserve.kernels.triton_rounding import round_tokens

_HALF_UNIT = UNIT // 2
_DEPTHS = (128, 64, 32, 16)  # columns of a step, if there are no groups
# Programs that the multiprocessors of an H200 hold at once, and steps along the inner dimension that are worth one: of
# tiles with few registers, and of others.
_MANY, _FEW = (396, 4), (264, 8)
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter knows no instructions


@triton.jit
def widen(word, zero, BITS: tl.constexpr):
    """int16 [rows, words] to fp16 [rows, words * 16 / BITS]: first the lowest bits of all words. ``zero``: fp16
    [rows, 1], of 4 bits."""
    rows: tl.constexpr = word.shape[0]
    words: tl.constexpr = word.shape[1]
    if BITS == 8:
        low, high = _widen_bytes(word)
        weight = tl.permute(tl.join(low, high), (0, 2, 1))
    else:
        # Below 2,048 fp16 holds integers; the second and fourth nibbles are 16 times what they mean.
        first, second, third, fourth = _widen_nibbles(word)
        even = tl.join(first - (zero + 1024.0), third - (zero + 1024.0))
        odd = tl.join(second * 0.0625 - (zero + 64.0), fourth * 0.0625 - (zero + 64.0))
        weight = tl.permute(tl.join(even, odd), (0, 2, 3, 1))
    return tl.reshape(weight, [rows, words * 16 // BITS])


@triton.jit
def _widen_bytes(word):
    """The two e4m3 of a word."""
    if _COMPILED:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 both; .reg .b16 low, high;
            prmt.b32 both, $2, 0, 0x3120; mov.b32 {low, high}, both;
            cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }""",
            "=r,=r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = word.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (word >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def _widen_nibbles(word):
    """The four nibbles n of a word, as 1024 + n, 1024 + 16 n, and so on: bits of a number whose last one means 1."""
    if _COMPILED:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{ .reg .b32 low, high; mov.b32 low, $4; shr.u32 high, $4, 8;
            lop3.b32 $0, low, 0x000f000f, 0x64006400, 0xea; lop3.b32 $1, low, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 $2, high, 0x000f000f, 0x64006400, 0xea; lop3.b32 $3, high, 0x00f000f0, 0x64006400, 0xea; }""",
            "=r,=r,=r,=r,r", [word], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = (word & 15) + 1024.0, (word & 240) + 1024.0
        third, fourth = (word >> 8 & 15) + 1024.0, (word >> 8 & 240) + 1024.0
    return first.to(tl.float16), second.to(tl.float16), third.to(tl.float16), fourth.to(tl.float16)


@triton.jit(do_not_specialize=["M"])
def _matmul(
    x_ptr,  # fp16 [M, K], the columns of each DEPTH in the order of ``widen``
    x_scale_ptr,  # fp32 [M]
    weight_ptr,  # int16 [N, K * BITS / 16]
    scale_ptr,  # fp32 [N, groups]
    zero_ptr,  # int8 [N, groups], of 4 bits
    bias_ptr,  # [N] if BIAS
    out_ptr,  # [M, N]
    part_ptr,  # fp32 [tiles, PARTS, BLOCK_N * BLOCK_M] if PARTS > 1
    arrived_ptr,  # int32 [tiles], all zero
    M,
    N,
    K,  # a multiple of DEPTH
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,  # groups are of DEPTH columns; else there is one for each row
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    words: tl.constexpr = DEPTH * BITS // 16
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, there = tl.minimum(n, N - 1), m < M
    groups = K // DEPTH
    steps = tl.cdiv(groups, PARTS)
    first = tl.program_id(2) * steps
    row_ptrs = weight_ptr + row.to(tl.int64)[:, None] * (groups * words)
    weight_ptrs = row_ptrs + tl.arange(0, words)[None, :]
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * K + tl.arange(0, DEPTH)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if PDL:
        prefetch_first(row_ptrs, first * words, groups * words)
        gdc_launch_dependents()
        gdc_wait()
    spot = row * (groups if GROUPED else 1)
    # Scales and zeros are loaded a step ahead: the products wait for nothing but their factors.
    scale = tl.load(scale_ptr + spot + (tl.minimum(first, groups - 1) if GROUPED else 0))
    zero = tl.load(zero_ptr + spot + tl.minimum(first, groups - 1)) if BITS == 4 else scale
    for group in range(first, tl.minimum(first + steps, groups)):
        word = tl.load(weight_ptrs + group * words)
        x = tl.load(x_ptrs + group * DEPTH, mask=there[:, None], other=0.0)
        weight = widen(word, zero.to(tl.float16)[:, None], BITS)
        if GROUPED:
            after = spot + tl.minimum(group + 1, groups - 1)
            next_scale = tl.load(scale_ptr + after)
            zero = tl.load(zero_ptr + after) if BITS == 4 else next_scale
            acc += tl.dot(weight, tl.trans(x)) * scale[:, None]
            scale = next_scale
        else:
            acc = tl.dot(weight, tl.trans(x), acc)
    if not GROUPED:
        acc *= scale[:, None]
    inside, is_last = there[None, :] & (n < N)[:, None], True
    if PARTS > 1:
        acc, is_last = _add_parts(acc, part_ptr, arrived_ptr, PARTS)
    if is_last:
        acc *= tl.load(x_scale_ptr + m, mask=there, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        out_ptrs = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(acc, part_ptr, arrived_ptr, PARTS: tl.constexpr):
    """Leave this program's part. Returns the sum of all, and whether they have all been left; if not, the sum is
    anything."""
    rows: tl.constexpr = acc.shape[0]
    columns: tl.constexpr = acc.shape[1]
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    part_ptrs = part_ptr + tile.to(tl.int64) * (PARTS * rows * columns) + at
    tl.store(part_ptrs + tl.program_id(2) * (rows * columns), acc)
    # All threads' stores come before the release that tells the others about them.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == PARTS - 1
    if is_last:
        acc = tl.zeros([rows, columns], tl.float32)
        for part in tl.static_range(PARTS):
            acc += tl.load(part_ptrs + part * (rows * columns), cache_modifier=".cg")
    return acc, is_last


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
    x: Tensor,
    matrix: QuantizedMatrix,
    bias: Tensor | None,
    pdl: bool,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
    parts: int | None = None,
) -> Tensor:
    """x [M, K], its columns as those of ``matrix`` [N, K] lie, @ matrix.T (+ bias): [M, N]. ``norm`` and
    ``residual`` as of ``round_tokens``. Tile: of matrix and tokens; ``parts``: along K."""
    (m, k), n, form = x.shape[-2:], matrix.shape[0], matrix.form
    tile = tile or _narrow_tile(m, form.bits)
    depth = form.group or next(size for size in _DEPTHS if k % size == 0)
    tiles = triton.cdiv(m, tile.columns), triton.cdiv(n, tile.rows)
    parts = parts or _num_parts(tiles[0] * tiles[1], k // depth, *(_FEW if tile.rows * tile.columns > 2048 else _MANY))
    arrived = x.new_empty(tiles[0] * tiles[1], dtype=torch.int32)
    narrow, scales = round_tokens(x, None, pdl, norm, residual, words=(form.bits, depth), zeros=arrived)
    out = x.new_empty(m, n)
    sums = scales.new_empty(len(arrived) * parts * tile.rows * tile.columns if parts > 1 else 1)
    _matmul[(*tiles, parts)](
        narrow,
        scales,
        matrix.values.view(torch.int16),
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        x if bias is None else bias,
        out,
        sums,
        arrived,
        m,
        n,
        k,
        BITS=form.bits,
        GROUPED=form.group is not None,
        DEPTH=depth,
        BLOCK_M=tile.columns,
        BLOCK_N=tile.rows,
        PARTS=parts,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl,
    )
    return out


def _narrow_tile(tokens: int, bits: int) -> Tile:
    """Rows of weights, and columns that are tokens."""
    columns = min(64, max(16, triton.next_power_of_2(tokens)))
    return Tile(128 if bits == 4 else 64, columns, 128, 4, 4)


def _num_parts(tiles: int, steps: int, programs: int, min_steps: int) -> int:
    """So that all programs run at once, as long as each has something to do."""
    parts: int = max(1, min(programs // tiles, steps // min_steps))
    return 1 << (parts.bit_length() - 1)


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
