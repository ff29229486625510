"""Pointwise operations of a layer, and what comes before the first, each one kernel, for CUDA. Those of a layer take
part in programmatic dependent launch: a kernel may start while the one before it ends, and waits (``gdc_wait``) before
it touches what that one reads or writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.interface import HeadPlaces, Norm


@triton.jit
def load_stream(x_ptr, residual_ptr, spot, inside, part_stride, PARTS: tl.constexpr, ADD: tl.constexpr):
    """The sum of the parts of x, plus the residual if ADD, which it then replaces: fp32."""
    x = tl.load(x_ptr + spot, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * part_stride + spot, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        # The sum is rounded first, as the stream that the next layer reads is: both see the same numbers.
        x = (x + tl.load(residual_ptr + spot, mask=inside, other=0.0).to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(residual_ptr + spot, x, mask=inside)
        x = x.to(tl.float32)
    return x


@triton.jit
def _rms_norm(
    x_ptr,  # [PARTS, T, SIZE], to be summed
    residual_ptr,  # [T, SIZE], read and overwritten if ADD
    weight_ptr,  # [SIZE]
    out_ptr,  # [T, SIZE]
    eps,
    part_stride,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    spot = tl.program_id(0).to(tl.int64) * SIZE + at
    x = load_stream(x_ptr, residual_ptr, spot, inside, part_stride, PARTS, ADD)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(out_ptr + spot, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_mul(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr):
    """gate_up [T, 2 SIZE] -> out [T, SIZE]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_up_ptr + token * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    # GELU's tanh form: x * (1 + tanh(y)) / 2 is x * sigmoid(2 y), with y = sqrt(2 / pi) * (x + 0.044715 x^3).
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    result = gate / (1.0 + tl.exp(-inner)) * up
    tl.store(out_ptr + token * SIZE + at, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rope_store(
    qkv_ptr,  # [T, Q_HEADS + 2 KV_HEADS, D]
    positions_ptr,  # int32 [T]
    cos_sin_ptr,  # fp32 [positions, ROTARY]
    slots_ptr,  # int64 [T]
    q_norm_ptr,  # [D] if NORM
    k_norm_ptr,
    q_ptr,  # [T, Q_HEADS, D] out
    k_ptr,  # [slots, KV_HEADS, D] out
    v_ptr,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,  # heads of one program
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_D)
    half: tl.constexpr = ROTARY // 2
    mate = tl.where(dim < half, dim + half, tl.where(dim < ROTARY, dim - half, dim))
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (dim < D)[None, :]
    if NORM:
        weight_q = tl.load(q_norm_ptr + dim, mask=dim < D, other=0.0).to(tl.float32)
        weight_k = tl.load(k_norm_ptr + dim, mask=dim < D, other=0.0).to(tl.float32)
        mate_weight_q = tl.load(q_norm_ptr + mate, mask=dim < D, other=0.0).to(tl.float32)
        mate_weight_k = tl.load(k_norm_ptr + mate, mask=dim < D, other=0.0).to(tl.float32)
    # Positions and slots belong to the step and were written at least two kernels ago: they need no wait.
    slot = tl.load(slots_ptr + token)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROTARY + dim % half
    cos = tl.load(angle_ptr, mask=dim < ROTARY, other=1.0)
    sin = tl.load(angle_ptr + half, mask=dim < ROTARY, other=0.0)
    sin = tl.where(dim < half, -sin, sin)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line_ptr = qkv_ptr + token * (Q_HEADS + 2 * KV_HEADS) * D + head[:, None] * D
    x = tl.load(line_ptr + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(line_ptr + mate[None, :], mask=inside, other=0.0).to(tl.float32)
    value = x
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * tl.where(is_q[:, None], weight_q[None, :], weight_k[None, :])
        other = other * scale * tl.where(is_q[:, None], mate_weight_q[None, :], mate_weight_k[None, :])
    turned = x * cos[None, :] + other * sin[None, :]
    dtype = q_ptr.dtype.element_ty
    q_spot = token * Q_HEADS * D + head[:, None] * D + dim[None, :]
    tl.store(q_ptr + q_spot, turned.to(dtype), mask=inside & is_q[:, None])
    kept = inside & (slot >= 0)
    spot = slot * KV_HEADS * D + dim[None, :]
    k_head = (head - Q_HEADS)[:, None]
    # Rounded to the type of activations first, as everywhere, where the cache has a narrower one.
    key, value = turned.to(dtype).to(k_ptr.dtype.element_ty), value.to(dtype).to(v_ptr.dtype.element_ty)
    tl.store(k_ptr + spot + k_head * D, key, mask=kept & ~is_q[:, None] & ~is_v[:, None])
    tl.store(v_ptr + spot + (k_head - KV_HEADS) * D, value, mask=kept & is_v[:, None])


def rms_norm(x: Tensor, norm: Norm, residual: Tensor | None, pdl: bool) -> Tensor:
    """Norm of x [T, H], or of x + residual, which then replaces ``residual``; x may come in parts [P, T, H]."""
    tokens, size = x.shape[-2:]
    out = x.new_empty(tokens, size)
    block = triton.next_power_of_2(size)
    tensors = (x, x if residual is None else residual, norm.weight, out)
    sizes = {"PARTS": x.shape[0] if x.dim() == 3 else 1, "SIZE": size, "BLOCK": block}
    launch = {"PDL": pdl, "launch_pdl": pdl, "num_warps": min(max(block // 512, 1), 16)}
    _rms_norm[(tokens,)](*tensors, norm.eps, tokens * size, **sizes, ADD=residual is not None, **launch)
    return out


def silu_mul(gate_up: Tensor, pdl: bool) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    return _activate(gate_up, gelu=False, pdl=pdl)


def gelu_mul(gate_up: Tensor, pdl: bool) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    return _activate(gate_up, gelu=True, pdl=pdl)


def _activate(gate_up: Tensor, *, gelu: bool, pdl: bool) -> Tensor:
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    block = min(triton.next_power_of_2(size), 1024)
    grid = (tokens, triton.cdiv(size, block))
    _gated_mul[grid](gate_up, out, SIZE=size, BLOCK=block, GELU=gelu, PDL=pdl, launch_pdl=pdl)
    return out


def rope_store(qkv: Tensor, places: HeadPlaces, pdl: bool) -> Tensor:
    """See ``Ops.rope_store``."""
    q_norm, k_norm = places.q_norm, places.k_norm
    kv_heads, head_dim = places.k_cache.shape[-2:]
    tokens, width = qkv.shape
    q_heads = width // head_dim - 2 * kv_heads
    q = qkv.new_empty(tokens, q_heads, head_dim)
    block_d = triton.next_power_of_2(head_dim)
    heads = max(1, 1024 // block_d)
    norms = (q_norm.weight if q_norm else qkv, k_norm.weight if k_norm else qkv)
    tensors = (qkv, places.positions, places.cos_sin, places.slots, *norms, q, places.k_cache, places.v_cache)
    shape = {"Q_HEADS": q_heads, "KV_HEADS": kv_heads, "D": head_dim, "ROTARY": places.cos_sin.shape[-1]}
    constants = {**shape, "BLOCK_D": block_d, "HEADS": heads, "NORM": q_norm is not None, "PDL": pdl}
    grid = (tokens, triton.cdiv(q_heads + 2 * kv_heads, heads))
    _rope_store[grid](*tensors, q_norm.eps if q_norm else 0.0, **constants, num_warps=4, launch_pdl=pdl)
    return q


@triton.jit(do_not_specialize=["num_seqs"])
def _decode_inputs(
    rows_ptr,  # int32 [S]
    kv_lens_ptr,  # int32 [S]
    table_ptr,  # int32 [max_rows, table_stride]
    last_tokens_ptr,  # int64 [max_rows + 1 or more]
    ids_ptr,  # int64 [S] out
    positions_ptr,  # int32 [S] out
    slots_ptr,  # int64 [S] out
    num_seqs,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = seq < num_seqs
    row = tl.load(rows_ptr + seq, mask=inside, other=0)
    kv_len = tl.load(kv_lens_ptr + seq, mask=inside, other=0)
    real = kv_len > 0
    position = tl.maximum(kv_len - 1, 0)
    page = tl.load(table_ptr + row.to(tl.int64) * table_stride + position // PAGE, mask=real, other=0)
    slot = tl.where(real, page.to(tl.int64) * PAGE + position % PAGE, -1)
    tl.store(ids_ptr + seq, tl.load(last_tokens_ptr + row, mask=inside, other=0), mask=inside)
    tl.store(positions_ptr + seq, position, mask=inside)
    tl.store(slots_ptr + seq, slot, mask=inside)


def decode_inputs(
    rows: Tensor, kv_lens: Tensor, page_table: Tensor, last_tokens: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """rows, kv_lens int32 [S], page_table int32 [max_rows, max_pages], last_tokens int64 by row.

    Returns ids int64, positions int32 and slots int64, [S] each. A sequence of kv_len 0 is padding: position 0, slot
    -1, and its row need not be in the page table. An ordinary launch: kernels with programmatic launch that follow may
    read its results before they wait, if another ordinary kernel (the embedding) lies between.
    """
    size = len(rows)
    ids, slots = (torch.empty(size, dtype=torch.int64, device=rows.device) for _ in range(2))
    positions = torch.empty_like(rows)
    block = 128
    tensors = (rows, kv_lens, page_table, last_tokens, ids, positions, slots)
    _decode_inputs[(triton.cdiv(size, block),)](*tensors, size, page_table.stride(0), PAGE=page_size, BLOCK=block)
    return ids, positions, slots
