"""Sampling by Gumbel-max on CUDA: one pass over the logits, no probabilities, and a draw that depends on nothing but
(seed, number of known tokens, token id), so neither on the batch nor on the order of execution.

argmax(logit / T - log(E)) with E exponentially distributed picks token i with probability softmax(logit / T)[i].

Top-k, top-p and min-p each keep the tokens from some logit up. ``_floor_of_row`` finds the highest of these floors on
the few largest logits where these are sure to hold it: by comparing each with each, or by bisection over the bits of a
float where they are many.

``triton_parts`` draws the same tokens where ranks have parts of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 4096  # logits of one program, and candidates for a floor
FEW = 128  # candidates, compared with each other: the usual top-k leaves no more


@triton.jit
def _mix64(x):
    """Finalizer of splitmix64 (Steele et al. 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def log_exponential(seed, num_known, token):
    """log(E) for each token id: a keyed murmur3 finalizer gives 32 bits, -log1p(-v) turns them into E."""
    key = _mix64(seed.to(tl.uint64) + _mix64(num_known.to(tl.uint64) + 0x9E3779B97F4A7C15))
    h = token.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13) ^ (key >> 32).to(tl.uint32)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    # A few units below 1, where log would be infinite; small values, which win, keep their relative precision.
    v = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064e-10, 0.99999994)
    exponential = tl.where(v < 0.01, v * (1.0 + v * (0.5 + v * 0.33333334)), -_fast_log(1.0 - v))
    return _fast_log(exponential)


@triton.jit
def _fast_log(x):
    """Natural logarithm by the hardware's base-2 one, absolute error 2e-7: a fifth of the exact one's time."""
    log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return log2 * 0.6931471805599453


@triton.jit
def ordered(x):
    """Bits of fp32 as uint32 in the order of the values."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def value_of(key):
    """The inverse of ``ordered``."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ tl.where(bits < 0, -2147483648, -1)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, top, scale):
    return tl.exp2((x - top) * scale)


@triton.jit
def _load(values_ptr, start, size, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.load(values_ptr + at, mask=at < size, other=float("-inf"))


@triton.jit
def _amount_from(values_ptr, size, key, top, scale, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the values are not below ``key``, or their weight."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        x = _load(values_ptr, start, size, BLOCK)
        amount = weight_of(x, top, scale) if BY_WEIGHT else tl.full([BLOCK], 1.0, tl.float32)
        total += tl.where((ordered(x) >= key) & (start + at < size), amount, 0.0)
    return tl.sum(total, 0)


@triton.jit
def floor_for(values_ptr, size, target, top, scale, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The highest key from which on there are ``target`` values, or so much of their weight."""
    key = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        enough = _amount_from(values_ptr, size, key | bit, top, scale, BY_WEIGHT, BLOCK) >= target
        key = tl.where(enough, key | bit, key)
        bit = bit >> 1
    return key


@triton.jit
def _floor_of_values(values_ptr, size, top_k, top_p, weight, top, scale, has_top_k, BLOCK: tl.constexpr):
    """The floor of top-k, then that of top-p as a share of what top-k has left; ``weight`` is that of all tokens."""
    key = tl.full([], 0, tl.uint32)
    if has_top_k:
        key = floor_for(values_ptr, size, top_k, top, scale, False, BLOCK)
        # Of several tokens at the floor only as many count as top-k has room for.
        surplus = _amount_from(values_ptr, size, key, top, scale, False, BLOCK) - top_k
        weight = _amount_from(values_ptr, size, key, top, scale, True, BLOCK)
        weight -= surplus * weight_of(value_of(key), top, scale)
    if top_p < 1.0:
        key = tl.maximum(key, floor_for(values_ptr, size, top_p * weight, top, scale, True, BLOCK))
    return key


@triton.jit
def _floor_of_few(values_ptr, size, top_k, top_p, weight, top, scale, has_top_k, FEW: tl.constexpr):
    """``_floor_of_values`` of at most FEW values, without a step for each bit."""
    at = tl.arange(0, FEW)
    inside = at < size
    x = tl.load(values_ptr + at, mask=inside, other=float("-inf"))
    keys = tl.where(inside, ordered(x), 0)
    from_here = (keys[None, :] >= keys[:, None]) & inside[None, :]  # [of each value, the values from it up]
    counts = tl.sum(from_here.to(tl.float32), 1)
    weights = tl.sum(tl.where(from_here, weight_of(x, top, scale)[None, :], 0.0), 1)
    key = tl.full([], 0, tl.uint32)
    if has_top_k:
        key = tl.max(tl.where(counts >= top_k, keys, 0), 0)
        at_key = inside & (keys == key)
        surplus = tl.max(tl.where(at_key, counts, 0.0), 0) - top_k
        weight = tl.max(tl.where(at_key, weights, 0.0), 0) - surplus * weight_of(value_of(key), top, scale)
    if top_p < 1.0:
        key = tl.maximum(key, tl.max(tl.where(weights >= top_p * weight, keys, 0), 0))
    return key


@triton.jit
def lane_bound(highest, wanted):
    """A key from which on there are ``wanted`` of the values, and hardly more: the largest with 20 bits."""
    bound = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(20):
        enough = tl.sum((ordered(highest) >= (bound | bit)).to(tl.int32), 0) >= wanted
        bound = tl.where(enough, bound | bit, bound)
        bit = bit >> 1
    return bound


@triton.jit
def _keep(values_ptr, size, bound, top, scale, kept_ptr, BLOCK: tl.constexpr):
    """Copy values that are not below ``bound``, as far as BLOCK of them. Returns how many there are, the weight of all
    values and theirs."""
    at = tl.arange(0, BLOCK)
    count = tl.full([], 0, tl.int32)
    weights = tl.zeros([BLOCK], tl.float32)
    kept_weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        x = _load(values_ptr, start, size, BLOCK)
        weight = weight_of(x, top, scale)
        weights += weight
        take = (ordered(x) >= bound) & (start + at < size)
        number = tl.sum(take.to(tl.int32), 0)
        if number > 0:
            place = count + tl.cumsum(take.to(tl.int32), 0) - 1
            tl.store(kept_ptr + place, x, mask=take & (place < BLOCK))
            kept_weights += tl.where(take, weight, 0.0)
        count += number
    tl.debug_barrier()
    return count, tl.sum(weights, 0), tl.sum(kept_weights, 0)


@triton.jit
def _floor_of_row(
    logits_ptr,  # [samples, vocab]
    rows_ptr,  # int32 [samples]
    floats_ptr,  # fp32 [max_rows, floats_stride]
    ints_ptr,  # int64 [max_rows, ints_stride]
    candidates_ptr,  # fp32 [samples, BLOCK] scratch
    floors_ptr,  # fp32 [samples] out
    vocab,
    logits_stride,
    floats_stride,
    ints_stride,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sample)
    temperature = tl.load(floats_ptr + row * floats_stride)
    top_p = tl.load(floats_ptr + row * floats_stride + 1)
    min_p = tl.load(floats_ptr + row * floats_stride + 2)
    top_k = tl.load(ints_ptr + row * ints_stride + 1).to(tl.int32)
    has_top_k = top_k < vocab
    floor = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0) & (has_top_k | (top_p < 1.0) | (min_p > 0.0)):
        line_ptr = logits_ptr + sample * logits_stride
        kept_ptr = candidates_ptr + sample * BLOCK
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            highest = tl.maximum(highest, _load(line_ptr, start, vocab, BLOCK))
        top = tl.max(highest, 0)
        scale = 1.4426950408889634 / temperature
        if has_top_k | (top_p < 1.0):
            # Every BLOCK-th token is of one lane. There are at least as many tokens from the n-th largest of the lanes'
            # maxima up as there are lanes, and hardly more.
            few = has_top_k & (top_k <= BLOCK // 4)
            wanted = tl.where(few, top_k, BLOCK // 2)
            bound = lane_bound(highest, wanted)
            count, total, kept = _keep(line_ptr, vocab, bound, top, scale, kept_ptr, BLOCK)
            holds_top_p = (has_top_k == 0) & (kept >= top_p * total)
            if (count <= FEW) & (few | holds_top_p):
                key = _floor_of_few(kept_ptr, count, top_k, top_p, total, top, scale, has_top_k, FEW)
                key = tl.maximum(key, bound)
            elif (count <= BLOCK) & (few | holds_top_p):
                key = _floor_of_values(kept_ptr, count, top_k, top_p, total, top, scale, has_top_k, BLOCK)
                key = tl.maximum(key, bound)
            else:
                key = _floor_of_values(line_ptr, vocab, top_k, top_p, total, top, scale, has_top_k, BLOCK)
            # Summed up in two orders all weights may come to less than their share top_p: then none is left out.
            if key > 0:
                floor = value_of(tl.minimum(key, ordered(top)))
        if min_p > 0.0:
            floor = tl.maximum(floor, top + tl.log(min_p) * temperature)
    tl.store(floors_ptr + sample, floor)


@triton.jit
def best_of_block(
    logits_ptr,  # [samples, columns]
    rows_ptr,  # int32 [samples]
    floats_ptr,  # fp32 [max_rows, floats_stride]
    ints_ptr,  # int64 [max_rows, ints_stride]
    num_known_ptr,  # int32 [samples]
    floors_ptr,  # fp32 [samples], or None
    lines_ptr,  # fp32 [samples, 2, entries] out: scores, then token ids; those of a rank from RANK * slots on
    entries,
    slots,
    columns,  # behind which is padding
    first,  # token id of the first column
    most_top_k,  # rows with this or less are left out, if SKIPS
    logits_stride,
    floats_stride,
    ints_stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,  # zeros are written for the others
    SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sample = tl.program_id(1)
    block = tl.program_id(0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    token = first + column
    row = tl.load(rows_ptr + sample)
    temperature = tl.load(floats_ptr + row * floats_stride)
    taken = True
    if SKIPS:
        taken = (temperature <= 0) | (tl.load(ints_ptr + row * ints_stride + 1) > most_top_k)
        columns = tl.where(taken, columns, 0)
    inside = column < columns
    score = tl.load(logits_ptr + sample.to(tl.int64) * logits_stride + column, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    # A NaN becomes +inf, which no sound logit is, and so reaches the end.
    score = tl.where(score < float("inf"), score, float("inf"))
    if floors_ptr is not None:
        score = tl.where(score >= tl.load(floors_ptr + sample), score, float("-inf"))
    if temperature > 0:
        noise = log_exponential(tl.load(ints_ptr + row * ints_stride), tl.load(num_known_ptr + sample), token)
        score = score / temperature - noise
    best = tl.max(score, 0)
    # Of equal scores the lowest id.
    best_id = tl.min(tl.where(score == best, token, first + columns), 0)
    spot_ptr = lines_ptr + sample * 2 * entries + block
    for rank in tl.static_range(RANKS):
        tl.store(spot_ptr + rank * slots, best if rank == RANK else 0.0, mask=taken)
        tl.store(spot_ptr + entries + rank * slots, best_id.to(tl.float32) if rank == RANK else 0.0, mask=taken)


@triton.jit
def _best_of_row(
    lines_ptr,  # fp32 [samples, 2, entries], as above
    rows_ptr,
    drawn_ptr,  # int32 [2, samples] out: token ids, then 1 where logits were not finite
    last_tokens_ptr,  # int64 [max_rows] out
    entries,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sample = tl.program_id(0)
    at = tl.arange(0, ENTRIES)
    inside = at < entries
    line_ptr = lines_ptr + sample * 2 * entries
    best = tl.load(line_ptr + at, mask=inside, other=float("-inf"))
    ids = tl.load(line_ptr + entries + at, mask=inside, other=0.0)
    top = tl.max(best, 0)
    failed = (top == float("inf")) | (top == float("-inf"))
    token = tl.where(failed, 0.0, tl.min(tl.where(best == top, ids, float("inf")), 0)).to(tl.int64)
    tl.store(drawn_ptr + sample, token.to(tl.int32))
    tl.store(drawn_ptr + tl.num_programs(0) + sample, failed.to(tl.int32))
    tl.store(last_tokens_ptr + tl.load(rows_ptr + sample), token)


def sample(
    logits: Tensor,  # fp32 [S, vocab], unit stride within a row
    rows: Tensor,  # int32 [S]
    floats: Tensor,  # fp32 [max_rows, 3 or more]: temperature (0 is greedy), top-p, min-p
    ints: Tensor,  # int64 [max_rows, 2]: seed, top-k (vocab: all)
    num_known: Tensor,  # int32 [S]: tokens before the one to sample
    last_tokens: Tensor,  # int64 [max_rows], gets the sampled tokens
    pdl: bool = True,
) -> Tensor:
    """See ``SamplingKernels.draw``. Not finite: a NaN or +inf among the logits, or -inf alone."""
    samples, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    floors, candidates, lines = scratch(samples), scratch(samples, BLOCK), scratch(samples, 2 * blocks)
    drawn = scratch(2, samples, dtype=torch.int32)
    rules, strides = (rows, floats, ints), (logits.stride(0), floats.stride(0), ints.stride(0))
    launch = {"PDL": pdl, "launch_pdl": pdl}
    looked_at = {"BLOCK": BLOCK, "FEW": FEW}
    _floor_of_row[(samples,)](logits, *rules, candidates, floors, vocab, *strides, **looked_at, num_warps=16, **launch)
    tensors, sizes = (logits, *rules, num_known, floors, lines), (blocks, blocks, vocab, 0, 0)
    alone = {"RANK": 0, "RANKS": 1, "SKIPS": False}
    best_of_block[(blocks, samples)](*tensors, *sizes, *strides, **alone, BLOCK=BLOCK, num_warps=8, **launch)
    entries = triton.next_power_of_2(blocks)
    _best_of_row[(samples,)](lines, rows, drawn, last_tokens, blocks, ENTRIES=entries, num_warps=1, **launch)
    return drawn
