"""Linear layers of a decode step on CUDA, with the norm before them and the activation or residual after them fused in.

A decode step reads each weight once for a few tokens, so what counts is how early and how evenly the weights stream in.
One token: ``_gemv``, whose blocks hold their weights in registers before the kernel that makes ``x`` has ended. More:
``_matmul`` on tensor cores, which asks the L2 cache for its weights that early instead. RMS norm needs no pass of its
own: the product is linear, so 1 / rms(x) is applied to the result and sum(x * x) is gathered on the way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.triton_ops import rms_norm, silu_mul


@triton.jit
def _finish(
    value, gate, scale, add_ptr, out_ptr, spot, mask, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr
):
    """Apply the norm's scale, the gate and the residual to fp32 results, and store them."""
    if NORM:
        value = value * scale
        gate = gate * scale
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
        gdc_wait()
        gdc_launch_dependents()
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
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    _finish(value, gate, scale, add_ptr, out_ptr, n, n < N, NORM, GATED, ADD)


@triton.jit(do_not_specialize=["M"])
def _matmul(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K], or [2 N, K] if GATED: first the gates
    norm_ptr,  # [K] if NORM
    add_ptr,  # [M, N] if ADD
    out_ptr,  # [M, N]
    eps,
    M,
    N,
    K: tl.constexpr,  # a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,  # a power of two >= K / 64
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    safe_m = tl.minimum(m, M - 1)
    safe_n = tl.minimum(n, N - 1).to(tl.int64)
    up_shift = N.to(tl.int64) * K
    if PDL:
        # 128-byte lines of this block's weights into the L2 cache; they do not depend on the kernel before.
        line = tl.minimum(tl.arange(0, LINES), K // 64 - 1)
        address = (weight_ptr + safe_n[:, None] * K + line[None, :] * 64).to(tl.int64)
        _prefetch_l2(address)
        if GATED:
            _prefetch_l2(address + up_shift * 2)
        gdc_wait()
        gdc_launch_dependents()
    x_ptrs = x_ptr + safe_m[:, None] * K + k[None, :]
    weight_ptrs = weight_ptr + safe_n[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptrs + start)
        weight = tl.load(weight_ptrs + start + (up_shift if GATED else 0))
        if NORM:
            norm = tl.load(norm_ptr + start + k).to(tl.float32)
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            x = (wide * norm[None, :]).to(x.dtype)
        acc = tl.dot(x, tl.trans(weight), acc)
        if GATED:
            gate_acc = tl.dot(x, tl.trans(tl.load(weight_ptrs + start)), gate_acc)
    scale = tl.rsqrt(squares / K + eps)[:, None]
    spot = m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    _finish(acc, gate_acc, scale, add_ptr, out_ptr, spot, inside, NORM, GATED, ADD)


@triton.jit
def _prefetch_l2(address):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


MAX_FUSED_TOKENS = 256  # beyond, the arithmetic matters most and the library's matrix product is faster


def fused_linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]; [2 N, K] if gated: gate projection, then up projection
    *,
    norm: Tensor | None = None,  # [K]
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,  # [M, N]
    dtype: torch.dtype | None = None,
    pdl: bool = True,
) -> Tensor:
    """rms_norm(x) (if ``norm``) times weight.T, then silu(gate) * up (if ``gated``), plus ``residual``: [M, N]."""
    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    if m > MAX_FUSED_TOKENS or k % 64:
        return _unfused(x, weight, norm, eps, gated, residual, pdl)
    out = torch.empty(m, n, dtype=dtype or x.dtype, device=x.device)
    options: dict[str, Any] = {
        "K": k,
        "NORM": norm is not None,
        "GATED": gated,
        "ADD": residual is not None,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    tensors = (x, weight, x if norm is None else norm, x if residual is None else residual, out)
    if m == 1:
        width = min(triton.next_power_of_2(k), 4096)
        block_n = max(1, 8192 // width // (2 if gated else 1))
        _gemv[(triton.cdiv(n, block_n),)](*tensors, eps, n, BLOCK_N=block_n, BLOCK_K=width, num_warps=4, **options)
        return out
    block_m, block_n, block_k, stages, warps = _tile(m, n, k)
    block_n //= 2 if gated else 1
    _matmul[(triton.cdiv(m, block_m), triton.cdiv(n, block_n))](
        *tensors,
        eps,
        m,
        n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        LINES=triton.next_power_of_2(k // 64),
        num_warps=warps,
        **options,
    )
    return out


def _unfused(
    x: Tensor, weight: Tensor, norm: Tensor | None, eps: float, gated: bool, residual: Tensor | None, pdl: bool
) -> Tensor:
    """The same, one kernel after the other."""
    if norm is not None:
        x = rms_norm(x, norm, eps, None, pdl)
    if residual is not None:
        return torch.addmm(residual, x, weight.t())
    out = F.linear(x, weight)
    return silu_mul(out, pdl) if gated else out


def _tile(m: int, n: int, k: int) -> tuple[int, int, int, int, int]:
    """Rows, columns, depth, stages and warps, as measured best on an H200."""
    block_k = 128 if k % 128 == 0 else 64
    if m <= 16:
        return 16, 32, block_k, 4, 4
    if m <= 64:
        return 64, 32 if n <= 4096 else 64, block_k, 3, 4
    return 64, 32 if n <= 1024 else 128, 64, 4, 4
