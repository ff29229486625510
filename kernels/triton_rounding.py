"""Tokens as products with quantized weights take them on CUDA: rounded, each with its scales, after their norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float16, float32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.interface import Norm
from radixserve.kernels.quantized import FP8, FP8_MAX, SMALLEST_SCALE, UNIT
from radixserve.kernels.triton_ops import load_stream

_LARGEST_FP16 = 32768.0


@triton.jit(do_not_specialize=["num_zeros"])
def _round_tokens(
    x_ptr,  # [PARTS, T, SIZE], to be summed
    residual_ptr,  # [T, SIZE], read and overwritten if ADD
    norm_ptr,  # [SIZE] if NORM
    out_ptr,  # e4m3 or fp16 [T, SIZE]
    scale_ptr,  # fp32 [SIZE / GROUP, T]
    zeros_ptr,  # int32 [num_zeros]: zeroed
    num_zeros,
    eps,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, as BLOCK: GROUPS groups of BLOCK columns, or what there is of them
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,  # of a weight, in words of which the columns of each DEPTH lie; 0: they keep their order
    DEPTH: tl.constexpr,
    HALF: tl.constexpr,  # columns of 4 bits that lie beside each other
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, group, lane = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    there = group < SIZE // GROUP
    at = group[:, None] * GROUP + lane[None, :]
    inside, column = there[:, None] & (lane < GROUP)[None, :], at
    if BITS > 0:
        words: tl.constexpr = DEPTH * BITS // 16
        nth, byte = at % DEPTH // words, at % words * 2
        within = byte + nth if BITS == 8 else byte // HALF * (2 * HALF) + byte % HALF + nth // 2 + nth % 2 * HALF
        column = at // DEPTH * DEPTH + within
    x = load_stream(x_ptr, residual_ptr, token * SIZE + column, inside, tl.num_programs(0) * SIZE, PARTS, ADD)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x) / SIZE + eps) * tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / LARGEST, SMALLEST)
    rounded = tl.minimum(tl.maximum(x / scale[:, None], -LARGEST), LARGEST)
    tl.store(out_ptr + token * SIZE + at, rounded.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + group * tl.num_programs(0) + token, scale, mask=there)
    if token == 0:
        for start in range(0, num_zeros, BLOCK):
            tl.store(zeros_ptr + start + lane, 0, mask=start + lane < num_zeros)


def round_tokens(
    x: Tensor,
    group: int | None,
    pdl: bool,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    *,
    words: tuple[int, int] | None = None,
    zeros: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [T, K] in e4m3, and the scale of each ``group`` columns of a token, or of all: fp32 [K / group, T]. With
    ``norm``, the norm of x or of x + residual, which then replaces ``residual``; x may come in parts [P, T, K].

    ``words``: bits of a weight and columns of a step, for ``narrow_linear``: x becomes fp16, and the columns of each
    step lie as nibbles or bytes lie in words of 16 bits, first the lowest of all words. ``zeros`` int32: is zeroed."""
    tokens, size = x.shape[-2:]
    group, (bits, depth) = group or size, words or (0, 1)
    rounded = x.new_empty(tokens, size, dtype=float16 if words else FP8)
    scales = x.new_empty(size // group, tokens, dtype=float32)
    block = triton.next_power_of_2(size)
    _round_tokens[(tokens,)](
        x,
        x if residual is None else residual,
        x if norm is None else norm.weight,
        rounded,
        scales,
        x if zeros is None else zeros,
        0 if zeros is None else zeros.numel(),
        norm.eps if norm else 0.0,
        PARTS=x.shape[0] if x.dim() == 3 else 1,
        ADD=residual is not None,
        NORM=norm is not None,
        LARGEST=_LARGEST_FP16 if words else FP8_MAX,
        SMALLEST=SMALLEST_SCALE,
        SIZE=size,
        GROUP=group,
        GROUPS=triton.next_power_of_2(size // group),
        BLOCK=triton.next_power_of_2(group),
        BITS=bits,
        DEPTH=depth,
        HALF=UNIT // 2,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return rounded, scales
