"""Draws by ranks that hold parts of the logits, without gathering them. Each rank fills in its slots of a short line
for every row, the lines are added up over ranks (zeros elsewhere, so exactly), and all pick the same token of them.

A row that is greedy or has no filters: a rank tells the best score of each block of its columns, noise included. A row
with a small top-k, whose token is one of the largest logits, whatever top-p and min-p leave out of these: the largest
of its columns, from which the floor is found as ``triton_sampling`` finds it from all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.interface import LINE_ENTRIES, LogitPart
from radixserve.kernels.triton_sampling import (
    BLOCK,
    best_of_block,
    floor_for,
    lane_bound,
    log_exponential,
    ordered,
    value_of,
    weight_of,
)


@triton.jit
def _load_sound(logits_ptr, start, columns, BLOCK: tl.constexpr):
    """A NaN becomes +inf, as it does in a draw."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + at, mask=at < columns, other=float("-inf"))
    return tl.where(x < float("inf"), x, float("inf"))


@triton.jit
def _fill(own_ptr, RANK: tl.constexpr, SLOTS: tl.constexpr, ENTRIES: tl.constexpr):
    """Nothing in this rank's slots, zeros in those of the others."""
    entry = tl.arange(0, ENTRIES)
    tl.debug_barrier()
    tl.store(own_ptr + entry, tl.where(entry // SLOTS == RANK, float("-inf"), 0.0))
    tl.store(own_ptr + ENTRIES + entry, tl.zeros([ENTRIES], tl.float32))
    tl.debug_barrier()


@triton.jit
def _tell(
    logits_ptr,
    columns,
    first,
    low,
    high,
    place,
    own_ptr,
    SLOTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Enter logits whose keys are ``low`` to ``high``, and their tokens, from the slot ``place`` on. Returns the place
    behind them, beyond ``SLOTS`` if there were more."""
    at = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        x = _load_sound(logits_ptr, start, columns, BLOCK)
        take = (ordered(x) >= low) & (ordered(x) <= high) & (start + at < columns)
        number = tl.sum(take.to(tl.int32), 0)
        if number > 0:
            slot = place + tl.cumsum(take.to(tl.int32), 0) - 1
            fits = take & (slot < SLOTS)
            tl.store(own_ptr + slot, x, mask=fits)
            tl.store(own_ptr + ENTRIES + slot, (first + start + at).to(tl.float32), mask=fits)
        place += number
    return place


@triton.jit
def _largest_of_part(
    logits_ptr,  # [samples, columns]
    rows_ptr,  # int32 [samples]
    floats_ptr,  # fp32 [max_rows, floats_stride]
    ints_ptr,  # int64 [max_rows, ints_stride]
    lines_ptr,  # fp32 [samples, 2, ENTRIES] out: logits, then token ids
    columns,
    first,
    most_top_k,
    logits_stride,
    floats_stride,
    ints_stride,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sample)
    temperature = tl.load(floats_ptr + row * floats_stride)
    top_k = tl.load(ints_ptr + row * ints_stride + 1)
    if (temperature > 0) & (top_k <= most_top_k):
        part_ptr = logits_ptr + sample * logits_stride
        line_ptr = lines_ptr + sample * 2 * ENTRIES
        own_ptr = line_ptr + RANK * SLOTS
        wanted = top_k.to(tl.int32)
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, columns, BLOCK):
            highest = tl.maximum(highest, _load_sound(part_ptr, start, columns, BLOCK))
        bound = lane_bound(highest, wanted)  # see ``_floor_of_row``
        infinite = tl.full([], 0xFFFFFFFF, tl.uint32)
        _fill(line_ptr, RANK, SLOTS, ENTRIES)
        place = tl.full([], 0, tl.int32)
        count = _tell(part_ptr, columns, first, bound, infinite, place, own_ptr, SLOTS, ENTRIES, BLOCK)
        if count > SLOTS:
            # Hardly ever: the largest ones surely, and as many as there is room for of those equal to the last.
            key = floor_for(part_ptr, columns, wanted, 0.0, 0.0, False, BLOCK)
            _fill(line_ptr, RANK, SLOTS, ENTRIES)
            above = _tell(part_ptr, columns, first, key + 1, infinite, place, own_ptr, SLOTS, ENTRIES, BLOCK)
            _tell(part_ptr, columns, first, key, key, above, own_ptr, SLOTS, ENTRIES, BLOCK)


@triton.jit
def _key_for(keys, amounts, target):
    """The highest key from which on there is so much of the ``amounts``."""
    key = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        enough = tl.sum(tl.where(keys >= (key | bit), amounts, 0.0), 0) >= target
        key = tl.where(enough, key | bit, key)
        bit = bit >> 1
    return key


@triton.jit
def _floor(x, inside, top, temperature, top_k, top_p, min_p):
    """See ``_floor_of_few``."""
    scale = 1.4426950408889634 / temperature
    keys = tl.where(inside, ordered(x), 0)
    weights = tl.where(inside, weight_of(x, top, scale), 0.0)
    key = _key_for(keys, inside.to(tl.float32), top_k)
    if top_p < 1.0:
        from_here = keys >= key
        surplus = tl.sum(from_here.to(tl.float32), 0) - top_k
        total = tl.sum(tl.where(from_here, weights, 0.0), 0) - surplus * weight_of(value_of(key), top, scale)
        key = tl.maximum(key, _key_for(keys, weights, top_p * total))
    floor = tl.full([], float("-inf"), tl.float32)
    if key > 0:
        floor = value_of(tl.minimum(key, ordered(top)))
    if min_p > 0.0:
        floor = tl.maximum(floor, top + tl.log(min_p) * temperature)
    return floor


@triton.jit
def _pick(
    lines_ptr,  # fp32 [samples, 2, ENTRIES]
    rows_ptr,
    floats_ptr,
    ints_ptr,
    num_known_ptr,  # int32 [samples]
    drawn_ptr,  # int32 [2, samples] out: token ids, then 1 where logits were not finite
    last_tokens_ptr,  # int64 [max_rows] out
    blocks,  # of each rank
    most_top_k,
    floats_stride,
    ints_stride,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sample = tl.program_id(0)
    row = tl.load(rows_ptr + sample)
    temperature = tl.load(floats_ptr + row * floats_stride)
    top_k = tl.load(ints_ptr + row * ints_stride + 1)
    is_filtered = (temperature > 0) & (top_k <= most_top_k)
    entry = tl.arange(0, ENTRIES)
    inside = (entry < RANKS * SLOTS) & (entry % SLOTS < tl.where(is_filtered, SLOTS, blocks))
    line_ptr = lines_ptr + sample * 2 * ENTRIES
    score = tl.load(line_ptr + entry, mask=inside, other=float("-inf"))
    ids = tl.load(line_ptr + ENTRIES + entry, mask=inside, other=0.0)
    top = tl.max(score, 0)
    failed = (top == float("inf")) | (top == float("-inf"))
    if is_filtered:
        top_p = tl.load(floats_ptr + row * floats_stride + 1)
        min_p = tl.load(floats_ptr + row * floats_stride + 2)
        floor = _floor(score, inside, top, temperature, top_k.to(tl.float32), top_p, min_p)
        seed = tl.load(ints_ptr + row * ints_stride)
        noise = log_exponential(seed, tl.load(num_known_ptr + sample), ids.to(tl.int32))
        score = tl.where(score >= floor, score / temperature - noise, float("-inf"))
        top = tl.max(score, 0)
    token = tl.where(failed, 0.0, tl.min(tl.where(score == top, ids, float("inf")), 0)).to(tl.int64)
    tl.store(drawn_ptr + sample, token.to(tl.int32))
    tl.store(drawn_ptr + tl.num_programs(0) + sample, failed.to(tl.int32))
    tl.store(last_tokens_ptr + row, token)


def lines_of_part(
    logits: Tensor,  # fp32 [S, columns]
    rows: Tensor,  # int32 [S]
    floats: Tensor,  # as in ``sample``
    ints: Tensor,
    num_known: Tensor,
    part: LogitPart,
    pdl: bool = True,
) -> Tensor:
    """See ``SamplingKernels.lines_of_part``."""
    samples, columns = logits.shape
    blocks = triton.cdiv(columns, BLOCK)
    assert blocks <= part.slots, "no vocabulary is that large"
    lines = torch.empty(samples, 2 * LINE_ENTRIES, device=logits.device)
    rules, strides = (rows, floats, ints), (logits.stride(0), floats.stride(0), ints.stride(0))
    bounds, launch = (part.columns, part.first, part.most_top_k), {"PDL": pdl, "launch_pdl": pdl}
    _largest_of_part[(samples,)](
        *(logits, *rules, lines, *bounds, *strides),
        RANK=part.rank,
        SLOTS=part.slots,
        ENTRIES=LINE_ENTRIES,
        BLOCK=BLOCK,
        num_warps=16,
        **launch,
    )
    best_of_block[(blocks, samples)](
        *(logits, *rules, num_known, None, lines, LINE_ENTRIES, part.slots, *bounds, *strides),
        RANK=part.rank,
        RANKS=part.ranks,
        SKIPS=True,
        BLOCK=BLOCK,
        num_warps=8,
        **launch,
    )
    return lines


def pick(
    lines: Tensor,  # fp32 [S, 2 * LINE_ENTRIES]
    rows: Tensor,
    floats: Tensor,
    ints: Tensor,
    num_known: Tensor,
    last_tokens: Tensor,
    part: LogitPart,
    pdl: bool = True,
) -> Tensor:
    """See ``SamplingKernels.pick``."""
    drawn = torch.empty(2, len(lines), dtype=torch.int32, device=lines.device)
    _pick[(len(lines),)](
        *(lines, rows, floats, ints, num_known, drawn, last_tokens),
        *(triton.cdiv(part.width, BLOCK), part.most_top_k, floats.stride(0), ints.stride(0)),
        RANKS=part.ranks,
        SLOTS=part.slots,
        ENTRIES=LINE_ENTRIES,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return drawn
