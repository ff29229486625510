"""Linear layers of a decode step on CUDA, with the norm before them and the activation or residual after them fused in.

A decode step reads each weight once for a few tokens, so what counts is how early and how evenly the weights stream in.
One token: ``_gemv``, whose blocks hold their weights in registers before the kernel that makes ``x`` has ended. More:
``_matmul`` on tensor cores, which asks the L2 cache for its weights that early instead. RMS norm needs no pass of its
own: the product is linear, so 1 / rms(x) is applied to the result and sum(x * x) is gathered on the way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.interface import Norm


@triton.jit
def finish(value, gate, add_ptr, out_ptr, spot, mask, GATED: tl.constexpr, ADD: tl.constexpr):
    """Apply the gate and the residual to fp32 results, and store them."""
    if GATED:
        value = gate / (1.0 + tl.exp(-gate)) * value
    if ADD:
        value += tl.load(add_ptr + spot, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + spot, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gemv(
    x_ptr,  # [K]
    weight_ptr,  # [N, K], or [2 N, K] if GATED: first the gates
    norm_ptr,  # [K] if NORM
    add_ptr,  # [N] if ADD
    out_ptr,  # [N]
    eps,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    safe_n = tl.minimum(n, N - 1).to(tl.int64)
    line_ptr = weight_ptr + safe_n[:, None] * K + k[None, :]
    up_shift = N.to(tl.int64) * K
    inside = k < K
    # Gated: `weight` is the up projection and `gate` the gate; else `weight` is all there is.
    weight = tl.load(line_ptr + (up_shift if GATED else 0), mask=inside[None, :], other=0.0)
    gate_weight = tl.load(line_ptr, mask=inside[None, :], other=0.0) if GATED else weight
    if NORM:
        norm = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    gate_acc = acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            inside = start + k < K
            weight = tl.load(line_ptr + start + (up_shift if GATED else 0), mask=inside[None, :], other=0.0)
            if GATED:
                gate_weight = tl.load(line_ptr + start, mask=inside[None, :], other=0.0)
            if NORM:
                norm = tl.load(norm_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * norm
        acc += weight.to(tl.float32) * x[None, :]
        if GATED:
            gate_acc += gate_weight.to(tl.float32) * x[None, :]
    value = tl.sum(acc, 1)
    gate = tl.sum(gate_acc, 1) if GATED else value
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        value = value * scale
        gate = gate * scale
    finish(value, gate, add_ptr, out_ptr, n, n < N, GATED, ADD)


@triton.jit(do_not_specialize=["M"])
def _matmul(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K], or [2 N, K] if GATED: first the gates
    add_ptr,  # [M, N] if ADD
    out_ptr,  # [M, N]
    M,
    N,
    K,  # a multiple of BLOCK_K; not a constant, or the loop would be unrolled and run out of registers
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,  # a power of two >= K / 64
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    safe_n = tl.minimum(n, N - 1).to(tl.int64)
    up_shift = N.to(tl.int64) * K
    if PDL:
        # 128-byte lines of this block's weights into the L2 cache; they do not depend on the kernel before.
        line = tl.minimum(tl.arange(0, LINES), K // 64 - 1)
        address = (weight_ptr + safe_n[:, None] * K + line[None, :] * 64).to(tl.int64)
        prefetch_l2(address)
        if GATED:
            prefetch_l2(address + up_shift * 2)
        gdc_launch_dependents()
        gdc_wait()
    # Rows that are not there are not read: one row read by all blocks in their stead would be waited for.
    x_ptrs, there = x_ptr + m[:, None].to(tl.int64) * K + k[None, :], (m < M)[:, None]
    weight_ptrs = weight_ptr + safe_n[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptrs + start, mask=there, other=0.0)
        weight = tl.load(weight_ptrs + start + (up_shift if GATED else 0))
        acc = tl.dot(x, tl.trans(weight), acc)
        if GATED:
            gate_acc = tl.dot(x, tl.trans(tl.load(weight_ptrs + start)), gate_acc)
    spot = m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    finish(acc, gate_acc, add_ptr, out_ptr, spot, inside, GATED, ADD)


@triton.jit
def prefetch_l2(address):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_first(row_ptrs, start, width):
    """Ask the L2 cache for 32 KB of rows of ``width`` elements, from element ``start`` on, in 128-byte lines: what the
    memory gives while the kernel before rounds its tokens. row_ptrs: [rows, 1]."""
    line = 128 * 8 // row_ptrs.dtype.element_ty.primitive_bitwidth
    at = start + tl.arange(0, 256 // row_ptrs.shape[0]) * line
    prefetch_l2((row_ptrs + tl.minimum(at, width - 1)[None, :]).to(tl.int64))


MAX_TOKENS = 64  # of _matmul: beyond, arithmetic counts, and the library's product is as fast
MAX_WEIGHTS = 8 << 20  # of _matmul: products with more weights take longer than the launches that fusing saves


class Tile(NamedTuple):
    """A block's rows and columns of a product, how deep it reads at once and how far ahead, and its warps."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


def is_fused(tokens: int, weight: Tensor) -> bool:
    """Whether ``fused_linear`` is the fastest for ``tokens`` rows of x, as measured on an H200."""
    if weight.shape[1] % 64:
        return False
    return tokens == 1 or (tokens <= MAX_TOKENS and weight.numel() <= MAX_WEIGHTS)


def fused_linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]; [2 N, K] if gated: gate projection, then up projection
    *,
    norm: Norm | None = None,  # only if M is 1
    gated: bool = False,
    residual: Tensor | None = None,  # [M, N]
    out: Tensor | None = None,  # [M, N], of x's type by default
    pdl: bool = True,
) -> Tensor:
    """rms_norm(x) (if ``norm``) times weight.T, then silu(gate) * up (if ``gated``), plus ``residual``: [M, N]."""
    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    if m > 1:
        assert norm is None
        return tiled_linear(x, weight, _tile(m, n, k, gated), gated=gated, residual=residual, out=out, pdl=pdl)
    if out is None:
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    width = min(triton.next_power_of_2(k), 4096)
    block_n = max(1, 8192 // width // (2 if gated else 1))
    if gated and width < 4096:
        block_n *= 2
    tensors = (x, weight, norm.weight if norm else x, x if residual is None else residual, out)
    sizes = {"K": k, "BLOCK_N": block_n, "BLOCK_K": width, "num_warps": 8 if width > k else 4}
    options = {**_options(gated, residual, pdl), "NORM": norm is not None}
    _gemv[(triton.cdiv(n, block_n),)](*tensors, norm.eps if norm else 0.0, n, **sizes, **options)
    return out


def tiled_linear(
    x: Tensor,  # [M, K], K a multiple of tile.depth
    weight: Tensor,  # as of ``fused_linear``
    tile: Tile,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool = True,
) -> Tensor:
    """``fused_linear`` without a norm, in tiles of a given shape: a row's result depends on that shape, not on M."""
    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    if out is None:
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    tensors = (x, weight, x if residual is None else residual, out)
    blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "STAGES": tile.stages}
    options = {**_options(gated, residual, pdl), "LINES": triton.next_power_of_2(k // 64), "num_warps": tile.warps}
    _matmul[(triton.cdiv(m, tile.rows), triton.cdiv(n, tile.columns))](*tensors, m, n, k, **blocks, **options)
    return out


def _options(gated: bool, residual: Tensor | None, pdl: bool) -> dict[str, Any]:
    return {"GATED": gated, "ADD": residual is not None, "PDL": pdl, "launch_pdl": pdl}


def _tile(m: int, n: int, k: int, gated: bool) -> Tile:
    """What was measured best on an H200."""
    depth = next(size for size in (512, 256, 128, 64) if k % size == 0)
    if m <= 16:
        return Tile(16, 8, depth, 3, 2) if gated else Tile(16, 16, depth, 4, 2)
    depth = min(depth, 256)
    if m <= 32:
        if gated:
            return Tile(32, 8, depth, 4, 2)
        return Tile(32, 32, depth, 4, 4) if n >= 4096 else Tile(32, 16, depth, 4, 2)
    if gated:
        return Tile(64, 32, min(depth, 128), 4, 4)
    return Tile(64, 32, depth, 3, 4) if n >= 4096 else Tile(64, 16, depth, 4, 4)
