"""Sums over the GPUs of a host whose kernels write into each other's memory: one kernel gives, waits and adds up.

Each rank has a mailbox that the others write to: flags, then room for two sums, in which each rank has a slice. Block b
of a sum writes its tokens' part into the same slice of every mailbox, then raises its flag there, waits for the flags
of the others' block b, and adds up what it has been given, in the order of ranks: all ranks get the same bits.
(The idea of one-shot all-reduce: NVIDIA's TensorRT-LLM and vLLM's custom all-reduce, 2023.)

Why nothing is overwritten too early: sums are numbered, and odd and even ones have rooms of their own. A rank writes
for sum n + 2 once its kernel of sum n + 1 has ended, so some block of each other rank had begun with sum n + 1, and
hence that rank's kernel of sum n had ended. So all kernels that use the mailboxes run one after another, on one stream.
Flags only grow: that a rank is one sum ahead does no harm, and a flag raised to the largest number lets everybody go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixserve.kernels.interface import Norm
from radixserve.kernels.peer_memory import MAX_BLOCKS


@triton.jit(do_not_specialize=["tokens"])
def _sum_ranks(
    x_ptr,  # [PARTS, T, SIZE], whose sum is this rank's part
    residual_ptr,  # [T, SIZE], read and overwritten if ADD
    weight_ptr,  # [SIZE] if NORM
    out_ptr,  # [T, SIZE]; may be x if PARTS is 1
    mailboxes_ptr,  # int64 [RANKS]: their addresses
    counts_ptr,  # int64 [MAX_BLOCKS]: sums so far, the same in all entries between two kernels
    eps,
    tokens,
    part_stride,
    slice_bytes,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # MAX_BLOCKS
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    dtype = x_ptr.dtype.element_ty
    number = tl.load(counts_ptr + block) + 1
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    slice_elements = slice_bytes // (dtype.primitive_bitwidth // 8)
    room_at = (number % 2) * RANKS * slice_elements

    for token in range(block, tokens, num_blocks):
        spot = token * SIZE + at
        x = tl.load(x_ptr + spot, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * part_stride + spot, mask=inside, other=0.0).to(tl.float32)
        for rank in tl.static_range(RANKS):
            room_ptr = _room(mailboxes_ptr, rank, RANKS, BLOCKS, dtype)
            tl.store(room_ptr + room_at + RANK * slice_elements + spot, x.to(dtype), mask=inside)
    _meet(mailboxes_ptr, block, number, RANK, RANKS, BLOCKS)

    room_ptr = _room(mailboxes_ptr, RANK, RANKS, BLOCKS, dtype)
    for token in range(block, tokens, num_blocks):
        spot = token * SIZE + at
        x = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            # Past the L1 cache, which knows nothing of what other GPUs write.
            given_ptr = room_ptr + room_at + rank * slice_elements + spot
            x += tl.load(given_ptr, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        if ADD:
            # Rounded first, as the stream that the next layer reads is: both see the same numbers.
            x = (x + tl.load(residual_ptr + spot, mask=inside, other=0.0).to(tl.float32)).to(dtype)
            tl.store(residual_ptr + spot, x, mask=inside)
            x = x.to(tl.float32)
        if NORM:
            weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
        tl.store(out_ptr + spot, x.to(dtype), mask=inside)

    # Block b also counts for the blocks that this sum did not need, those of the same remainder.
    blocks = tl.arange(0, BLOCKS)
    tl.store(counts_ptr + blocks, tl.zeros([BLOCKS], tl.int64) + number, mask=blocks % num_blocks == block)


@triton.jit
def _room(mailboxes_ptr, rank, RANKS: tl.constexpr, BLOCKS: tl.constexpr, dtype: tl.constexpr):
    """Where the rooms of a mailbox begin, behind its flags int64 [RANKS, BLOCKS]."""
    mailbox = tl.load(mailboxes_ptr + rank)
    return tl.multiple_of((mailbox + RANKS * BLOCKS * 8).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _meet(mailboxes_ptr, block, number, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr):
    """Tell the same block of the other ranks that all this one has written for sum ``number`` is there, and wait until
    they say so, too."""
    tl.debug_barrier()  # all threads have written before one of them says so
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag_ptr = tl.load(mailboxes_ptr + rank).to(tl.pointer_type(tl.int64)) + RANK * BLOCKS + block
            tl.atomic_max(flag_ptr, number, sem="release", scope="sys")
    mailbox = tl.load(mailboxes_ptr + RANK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag_ptr = mailbox.to(tl.pointer_type(tl.int64)) + rank * BLOCKS + block
            while tl.atomic_add(flag_ptr, tl.cast(0, tl.int64), sem="acquire", scope="sys") < number:
                pass
    tl.debug_barrier()


class PeerSums:
    """``RankSums``; each rank makes them on one stream. ``mailboxes``: the address of each rank's, as this one may
    write to it; ``slice_bytes``: the largest sum, see ``mailbox_bytes``."""

    def __init__(self, rank: int, mailboxes: Sequence[int], slice_bytes: int, device: torch.device):
        self._rank, self._ranks, self._slice_bytes = rank, len(mailboxes), slice_bytes
        self._mailboxes = torch.tensor(mailboxes, dtype=torch.int64, device=device)
        self._counts = torch.zeros(MAX_BLOCKS, dtype=torch.int64, device=device)
        # A block that waits must not keep the one that others wait for from running.
        is_gpu = device.type == "cuda"  # and not interpreted
        fitting = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else MAX_BLOCKS
        self._blocks = min(MAX_BLOCKS, fitting)

    def fits(self, part: Tensor) -> bool:
        return part.shape[-2] * part.shape[-1] * part.element_size() <= self._slice_bytes

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._launch(tensor, tensor, None, None)
        return tensor

    def add_rms_norm(self, part: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        out = torch.empty_like(residual)
        self._launch(part, out, residual, norm)
        return out

    def _launch(self, part: Tensor, out: Tensor, residual: Tensor | None, norm: Norm | None) -> None:
        assert self.fits(part), "too long: it would overwrite what others give"
        tokens, size = part.shape[-2:]
        rounds = triton.cdiv(tokens, self._blocks)
        block = triton.next_power_of_2(size)
        _sum_ranks[(triton.cdiv(tokens, rounds),)](
            part,
            out if residual is None else residual,
            out if norm is None else norm.weight,
            out,
            self._mailboxes,
            self._counts,
            0.0 if norm is None else norm.eps,
            tokens,
            tokens * size,
            self._slice_bytes,
            RANK=self._rank,
            RANKS=self._ranks,
            PARTS=part.shape[0] if part.dim() == 3 else 1,
            SIZE=size,
            BLOCK=block,
            BLOCKS=MAX_BLOCKS,
            ADD=residual is not None,
            NORM=norm is not None,
            num_warps=min(max(block // 256, 4), 16),
        )
