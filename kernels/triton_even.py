"""Products of few tokens on CUDA (compute capability 9.0), cut evenly (stream-K: Osama et al., 2023).

The weights are a line of steps: column block after column block, each along the inner dimension. As many blocks of
threads as there are multiprocessors take equal shares of that line and go through them without letting the pipeline of
loads run empty. A column block that several shares meet in is summed up by the last of them to come, in the order of
the inner dimension, so that a result does not depend on which that is. Weights stand where rows of x usually do: so
the tensor cores take both from shared memory, however few the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from radixserve.kernels.triton_linear import MAX_TOKENS, MAX_WEIGHTS, prefetch_l2

_MAX_COLUMN_BLOCKS = 4096
_MAX_PARTS = 8
_EARLY_BYTES = 64 << 10  # of weights that a block asks for before the kernel ahead has ended


@triton.jit
def _barrier():
    """Of the block's threads. Triton pipelines no loop around a barrier that it knows of."""
    tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _hold(value):
    """``value``, so that what is done with it in a branch is not done ahead of the branch."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _sum_parts(part_ptr, first, depth, total, shares, spot, STRIDE: tl.constexpr, PARTS: tl.constexpr):
    """Of the shares that meet in steps first..first + depth, a column block, in their order."""
    acc = tl.zeros(spot.shape, tl.float32)
    # Step s is of share ((s + 1) * shares - 1) // total.
    from_share, to_share = ((first + 1) * shares - 1) // total, ((first + depth) * shares - 1) // total
    for meeting in tl.static_range(PARTS):
        share = from_share + meeting
        slot = 2 * share + (first > share * total // shares)
        live = (spot >= 0) & (share <= to_share)
        # Past the L1 cache, which is not coherent: other blocks wrote these.
        acc += tl.load(part_ptr + slot * STRIDE + spot, mask=live, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def _ask_early(weight_ptr, begin, end, depth, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr):
    """All 128-byte lines of the weights of steps begin..end into the L2 cache."""
    line = tl.arange(0, BLOCK_N)[:, None].to(tl.int64) * K + tl.arange(0, BLOCK_K // 64)[None, :] * 64
    for step in range(begin, end):
        start = (step // depth * BLOCK_N).to(tl.int64) * K + step % depth * BLOCK_K
        address = (weight_ptr + start + line).to(tl.int64)
        prefetch_l2(address)
        if GATED:
            prefetch_l2(address + N.to(tl.int64) * K * 2)


@triton.jit
def _end_column(
    acc,  # fp32 [BLOCK_N, BLOCK_M]
    gate,  # as acc, if GATED
    out_ptr,
    part_ptr,
    arrived_ptr,
    column,
    done,  # steps of it that acc is the sum of
    begin,  # of the share
    depth,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store a column block, or what this share has of it; all parts together, if this was the last."""
    if PDL:
        acc = _hold(acc)
        gate = _hold(gate) if GATED else gate
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if done < depth:
        first, total = column * depth, N // BLOCK_N * depth
        share, shares = tl.program_id(0), tl.num_programs(0)
        spot = n[:, None] * BLOCK_M + m[None, :]
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        STRIDE: tl.constexpr = 2 * SIZE if GATED else SIZE
        own_ptrs = part_ptr + (2 * share + (first > begin)) * STRIDE + spot
        tl.store(own_ptrs, acc)
        if GATED:
            tl.store(own_ptrs + SIZE, gate)
        # All threads' stores come before the release that tells the others about them.
        if PDL:
            _barrier()
        else:
            tl.debug_barrier()
        done += tl.atomic_add(arrived_ptr + column, done, sem="acq_rel")
        if done == depth:
            acc = _sum_parts(part_ptr, first, depth, total, shares, spot, STRIDE, PARTS)
            if GATED:
                gate = _sum_parts(part_ptr + SIZE, first, depth, total, shares, spot, STRIDE, PARTS)
            tl.store(arrived_ptr + column, 0)
    if done == depth:
        value = gate / (1.0 + tl.exp(-gate)) * acc if GATED else acc
        out_ptrs = out_ptr + m[None, :] * N + (column * BLOCK_N + n)[:, None]
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=(m < M)[None, :] & (n >= 0)[:, None])


@triton.jit(do_not_specialize=["M", "early"])
def _even_matmul(
    x_desc,  # [M, K] in blocks of [BLOCK_M, BLOCK_K]; 0 below row M
    weight_desc,  # in blocks of [BLOCK_N, BLOCK_K]
    weight_ptr,  # [N, K], or [2 N, K] if GATED: first the gates
    out_ptr,  # [M, N]
    part_ptr,  # fp32 [2 * shares, 2 if GATED else 1, BLOCK_N, BLOCK_M]: what each share begins and ends with
    arrived_ptr,  # int32 [column blocks], steps that parts were left of; all zero between launches
    M,
    N,  # a multiple of BLOCK_N
    K,  # a multiple of BLOCK_K; not a constant, or each size would be compiled anew
    early,  # steps whose weights are asked into the L2 cache before the kernel ahead has ended
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,  # at most so many shares meet in a column block
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    depth = K // BLOCK_K
    total = N // BLOCK_N * depth
    share, shares = tl.program_id(0), tl.num_programs(0)
    begin, end = share * total // shares, (share + 1) * total // shares
    if PDL:
        _ask_early(weight_ptr, begin, tl.minimum(begin + early, end), depth, N, K, BLOCK_N, BLOCK_K, GATED)
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        column, inner = step // depth, step % depth
        row = column * BLOCK_N
        x = x_desc.load([0, inner * BLOCK_K])
        weight = weight_desc.load([row + (N if GATED else 0), inner * BLOCK_K])
        if GATED:
            gate = tl.dot(weight_desc.load([row, inner * BLOCK_K]), tl.trans(x), gate)
        acc = tl.dot(weight, tl.trans(x), acc)
        if (inner == depth - 1) | (step == end - 1):
            _end_column(
                acc,
                gate,
                out_ptr,
                part_ptr,
                arrived_ptr,
                column,
                inner + 1 - tl.maximum(begin - column * depth, 0),
                begin,
                depth,
                M,
                N,
                BLOCK_M,
                BLOCK_N,
                PARTS,
                GATED,
                PDL,
            )
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)


class EvenTile(NamedTuple):
    """How a product is cut: columns of a block (gates are not counted) and depth of a step, steps loaded ahead."""

    columns: int
    depth: int
    stages: int


def choose_tile(tokens: int, n: int, k: int, gated: bool) -> EvenTile | None:
    """For a product of n columns from k, where that took 3% less than all else on an H200."""
    if n % 64 or k % 256:
        return None
    if n * k * (2 if gated else 1) > MAX_WEIGHTS:
        return EvenTile(32 if gated else 64, 256, 4) if 5 <= tokens <= 16 else None
    if gated or n > 1024 or not 2 <= tokens <= MAX_TOKENS:
        return None
    if 16 < tokens <= 32:
        return EvenTile(32, 256, 5) if k >= 2048 else None
    if k < 3072:
        return None
    return EvenTile(64, 256, 3) if tokens <= 16 else EvenTile(64, 128, 4)


class EvenProducts:
    """Owns the counters of the column blocks that shares meet in. Its products follow one another on one stream."""

    def __init__(self, multiprocessors: int, device: torch.device, pdl: bool = True):
        self._multiprocessors, self._pdl = multiprocessors, pdl
        self._arrived = torch.zeros(_MAX_COLUMN_BLOCKS, dtype=torch.int32, device=device)

    def linear(self, x: Tensor, weight: Tensor, tile: EvenTile, *, gated: bool = False) -> Tensor:
        """x [M, K] @ weight[N, K].T: [M, N], M up to 64; ``gated``: of a weight [2 N, K], first the gates,
        silu(gate) * up. N must be a multiple of ``tile.columns``, K of ``tile.depth``."""
        m, k = x.shape
        n = len(weight) // (2 if gated else 1)
        assert n % tile.columns == 0 and k % tile.depth == 0 and n // tile.columns <= _MAX_COLUMN_BLOCKS
        rows, columns = max(16, triton.next_power_of_2(m)), tile.columns * (2 if gated else 1)
        depth, steps = k // tile.depth, weight.numel() // (columns * tile.depth)
        shares = min(self._multiprocessors, steps // max(1, triton.cdiv(depth - 1, _MAX_PARTS - 1)))
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
        parts = torch.empty(2 * shares, columns, rows, dtype=torch.float32, device=x.device)
        _even_matmul[(shares,)](
            TensorDescriptor.from_tensor(x, [rows, tile.depth]),
            TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
            weight,
            out,
            parts,
            self._arrived,
            m,
            n,
            k,
            _EARLY_BYTES // (2 * columns * tile.depth),
            BLOCK_M=rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            STAGES=tile.stages,
            PARTS=_MAX_PARTS,
            GATED=gated,
            PDL=self._pdl,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        return out
