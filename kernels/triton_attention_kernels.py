"""The Triton kernels of paged decode attention; ``triton_attention`` says how they work together."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.triton_linear import prefetch_l2


@triton.jit
def start_units(length, START_UNITS: tl.constexpr):
    """Those that lie before the units of ``length`` tokens on the line."""
    return tl.where(length > 0, START_UNITS, 0)


@triton.jit(do_not_specialize=["num_seqs", "num_decodes"])
def cut_slices(
    kv_lens_ptr,  # int32 [num_seqs]
    unit_starts_ptr,  # int32 [num_seqs + 2] out: units before each sequence, all of them, and the end of those in use
    slice_seqs_ptr,  # int32 [num_slices] out: the sequence in which each slice begins
    num_seqs,
    num_decodes,  # the first so many; those in use end where the last one with tokens does
    num_slices,
    UNIT: tl.constexpr,
    START_UNITS: tl.constexpr,  # units of no tokens before those of each sequence: what it costs to begin with it
    MIN_UNITS: tl.constexpr,
    SEQS: tl.constexpr,  # a power of two >= num_seqs
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,  # only so many tokens of each sequence count; 0: all
    PDL: tl.constexpr,
):
    """Lay the sequences out on the line of units and find where each slice begins."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.arange(0, SEQS)
    lens = tl.load(kv_lens_ptr + seq, mask=seq < num_seqs, other=0)
    if WINDOW:
        lens = tl.minimum(lens, WINDOW)
    # An empty sequence is padding: it takes no unit, and nobody writes its output.
    units = (lens + UNIT - 1) // UNIT + start_units(lens, START_UNITS)
    ends = tl.cumsum(units, 0)
    total = tl.sum(units, 0)
    if tl.program_id(0) == 0:
        tl.store(unit_starts_ptr + seq, ends - units, mask=seq < num_seqs)
        tl.store(unit_starts_ptr + num_seqs, total)
        in_use = (seq < num_decodes) & (units > 0)
        tl.store(unit_starts_ptr + num_seqs + 1, tl.max(tl.where(in_use, seq + 1, 0), 0))
    used = tl.minimum(tl.maximum(total // MIN_UNITS, 1), num_slices)
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = (part.to(tl.int64) * total // used).to(tl.int32)
    before = (ends[None, :] <= begin[:, None]) & (seq[None, :] < num_seqs)
    tl.store(slice_seqs_ptr + part, tl.sum(before.to(tl.int32), 1), mask=part < num_slices)


@triton.jit
def _unseen(kv_len, WINDOW: tl.constexpr):
    """Tokens at the beginning of a sequence that lie outside of the window."""
    return tl.maximum(kv_len - WINDOW, 0) if WINDOW else 0


@triton.jit
def inside(rows, D: tl.constexpr, WIDTH: tl.constexpr):
    """Mask of [len(rows), WIDTH] entries: those of the ``rows`` that are there, and the first D of each."""
    return rows[:, None] if D == WIDTH else rows[:, None] & (tl.arange(0, WIDTH) < D)[None, :]


@triton.jit
def _widen_pairs(pairs):
    """int16 of two e4m3 each -> the first ones and the second ones, fp16."""
    first = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True)
    second = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return first.to(tl.float16), second.to(tl.float16)


@triton.jit
def attend(
    q,  # [ROWS, WIDTH], 0 from D on
    k_ptr,  # one KV head of the cache, [slots, D] with slot_stride
    v_ptr,
    table_row_ptr,  # int32 [pages of the sequence]
    begin,  # tokens begin..end of the sequence
    end,
    scale,  # of q . k, so that the score is in units of log(2); with SOFTCAP, that it is twice what tanh gets
    slot_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two >= D
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,  # scores lie in (-SOFTCAP, SOFTCAP), in units of log(2); 0: anywhere
):
    """Online softmax over a token range. Returns unnormalized output [ROWS, WIDTH], maximum and sum [ROWS] (base 2).

    e4m3 becomes fp16, which takes half the instructions of bf16. Its values are read in pairs: the tensor cores want
    several tokens of a dimension together, and what turns them that way turns no single bytes."""
    NARROW: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    dtype: tl.constexpr = tl.float16 if NARROW else q.dtype
    q = q.to(dtype)
    dim = tl.arange(0, WIDTH)
    pair = tl.arange(0, WIDTH // 2)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH // 2 if NARROW else WIDTH], tl.float32)
    second_acc = acc
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK)
        valid = token < end
        page = tl.load(table_row_ptr + token // PAGE, mask=valid, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        offset = slot[:, None] * slot_stride + dim[None, :]
        k = tl.load(k_ptr + offset, mask=inside(valid, D, WIDTH), other=0.0).to(dtype)
        score = tl.dot(q, tl.trans(k)) * scale
        if SOFTCAP > 0:  # a float is no condition to Triton
            score = SOFTCAP - 2 * SOFTCAP / (tl.exp2(score) + 1)  # SOFTCAP * tanh
        score = tl.where(valid[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        total = total * shrink + tl.sum(weight, 1)
        weight = weight.to(dtype)
        acc *= shrink[:, None]
        if NARROW:
            pair_ptrs = v_ptr.to(tl.pointer_type(tl.int16)) + slot[:, None] * (slot_stride // 2) + pair[None, :]
            pairs = tl.load(pair_ptrs, mask=inside(valid, D // 2, WIDTH // 2), other=0)
            first, second = _widen_pairs(pairs)
            acc = tl.dot(weight, first, acc)
            second_acc = tl.dot(weight, second, second_acc * shrink[:, None])
        else:
            acc = tl.dot(weight, tl.load(v_ptr + offset, mask=inside(valid, D, WIDTH), other=0.0), acc)
        top = new_top
    if NARROW:
        acc = tl.reshape(tl.join(acc, second_acc), [ROWS, WIDTH])
    return acc, top, total


@triton.jit
def prefetch_first_block(
    k_ptr,
    v_ptr,
    table_row_ptr,
    begin,
    kv_len,
    slot_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ask the L2 cache for the first keys and values, all 128-byte lines of them, while the kernel before ends."""
    if kv_len > begin:
        token = tl.minimum(begin + tl.arange(0, BLOCK), kv_len - 1)
        slot = tl.load(table_row_ptr + token // PAGE).to(tl.int64) * PAGE + token % PAGE
        offset = slot[:, None] * slot_stride + tl.minimum(tl.arange(0, WIDTH // 64) * 64, D - 1)[None, :]
        for base in tl.static_range(2):
            prefetch_l2(((k_ptr if base == 0 else v_ptr) + offset).to(tl.int64))


@triton.jit
def _merge(
    part_out_ptr,  # fp32 [parts, kv_heads, GROUP_ROWS, D]
    part_lse_ptr,  # fp32 [parts, kv_heads, GROUP_ROWS], base 2
    out_ptr,  # the output of this sequence and KV head, [GROUP, D]
    head,
    first,  # the slices first..last hold parts of the sequence
    last,
    first_part,  # index of the first slice's part; later slices' parts are 2 * slice
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,  # loaded at once
):
    """Join the parts of one sequence and head in the order of their slices."""
    row = tl.arange(0, GROUP_ROWS)
    dim = tl.arange(0, WIDTH)
    top = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, WIDTH], tl.float32)
    for start in range(first, last + 1, PARTS):
        for ahead in tl.static_range(PARTS):
            piece = start + ahead
            live = row < tl.where(piece <= last, GROUP_ROWS, 0)
            line = (tl.where(piece == first, first_part, 2 * piece) * KV_HEADS + head) * GROUP_ROWS + row
            # Past the L1 cache, which is not coherent: other blocks wrote these.
            lse = tl.load(part_lse_ptr + line, mask=live, other=float("-inf"), cache_modifier=".cg")
            spot = line[:, None] * D + dim[None, :]
            part = tl.load(part_out_ptr + spot, mask=inside(live, D, WIDTH), other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, lse)
            shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
            acc = acc * shrink[:, None] + part * weight[:, None]
            total = total * shrink + weight
            top = new_top
    result = acc / total[:, None]
    out_ptrs = out_ptr + row[:, None] * D + dim[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside(row < GROUP, D, WIDTH))


@triton.jit(do_not_specialize=["num_seqs", "num_slices", "table_stride"])
def decode(
    q_ptr,  # [num_seqs, KV_HEADS * GROUP, D]
    k_ptr,  # [pages, PAGE, KV_HEADS, D]
    v_ptr,
    out_ptr,  # as q
    table_ptr,  # int32 [max_rows, table_stride]
    rows_ptr,  # int32 [num_seqs]
    kv_lens_ptr,  # int32 [num_seqs]
    unit_starts_ptr,  # of cut_slices
    slice_seqs_ptr,
    part_out_ptr,  # fp32 [2 * num_slices, KV_HEADS, GROUP_ROWS, D]
    part_lse_ptr,  # fp32 [2 * num_slices, KV_HEADS, GROUP_ROWS]
    arrived_ptr,  # int32 [num_seqs, KV_HEADS], all zero between launches
    num_seqs,
    num_slices,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    START_UNITS: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One slice of one KV head: whole sequences go straight to the output, cut ones into parts."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    piece = tl.program_id(1)
    total = tl.load(unit_starts_ptr + num_seqs)
    seq = tl.load(slice_seqs_ptr + piece)
    used = tl.minimum(tl.maximum(total // MIN_UNITS, 1), num_slices)
    begin = (piece.to(tl.int64) * total // used).to(tl.int32)
    end = tl.minimum(((piece + 1).to(tl.int64) * total // used).to(tl.int32), total)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    spot = row[:, None] * D + dim[None, :]
    k_ptr += head * D
    v_ptr += head * D
    position = begin
    if PDL:
        # The plan may be read before the wait (see plan_decode); q and the newest keys may not.
        if PREFETCH and begin < end:
            first_kv_len = tl.load(kv_lens_ptr + seq)
            first_units = tl.load(unit_starts_ptr + seq) + start_units(first_kv_len, START_UNITS)
            first_row_ptr = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
            first = _unseen(first_kv_len, WINDOW) + tl.maximum(begin - first_units, 0) * UNIT
            prefetch_first_block(k_ptr, v_ptr, first_row_ptr, first, first_kv_len, KV_HEADS * D, D, WIDTH, PAGE, BLOCK)
        gdc_wait()
    while position < end:
        seq_begin = tl.load(unit_starts_ptr + seq)
        seq_end = tl.load(unit_starts_ptr + seq + 1)
        kv_len = tl.load(kv_lens_ptr + seq)
        table_row = tl.load(rows_ptr + seq)
        tokens_begin = seq_begin + start_units(kv_len, START_UNITS)
        stop = tl.minimum(end, seq_end)
        group = (seq.to(tl.int64) * KV_HEADS + head) * GROUP * D
        q = tl.load(q_ptr + group + spot, mask=inside(row < GROUP, D, WIDTH), other=0.0)
        row_ptr = table_ptr + table_row.to(tl.int64) * table_stride
        here = _unseen(kv_len, WINDOW) + tl.maximum(position - tokens_begin, 0) * UNIT
        until = tl.minimum(_unseen(kv_len, WINDOW) + (stop - tokens_begin) * UNIT, kv_len)
        acc, top, weight = attend(
            q, k_ptr, v_ptr, row_ptr, here, until, scale, KV_HEADS * D, D, WIDTH, PAGE, ROWS, BLOCK, STAGES, SOFTCAP
        )
        weight = tl.maximum(weight, 1e-30)
        result = acc / weight[:, None]
        if (position <= tokens_begin) & (stop == seq_end):
            tl.store(out_ptr + group + spot, result.to(out_ptr.dtype.element_ty), mask=inside(row < GROUP, D, WIDTH))
        elif stop > tokens_begin:
            part = 2 * piece + (seq_begin > begin).to(tl.int32)
            line = (part * KV_HEADS + head) * GROUP_ROWS
            tl.store(part_out_ptr + line * D + spot, result, mask=inside(row < GROUP_ROWS, D, WIDTH))
            tl.store(part_lse_ptr + line + row, top + tl.log2(weight), mask=row < GROUP_ROWS)
            # Unit u belongs to slice ((u + 1) * used - 1) // total.
            first = (((tokens_begin + 1).to(tl.int64) * used - 1) // total).to(tl.int32)
            last = ((seq_end.to(tl.int64) * used - 1) // total).to(tl.int32)
            first_begin = (first.to(tl.int64) * total // used).to(tl.int32)
            # All threads' stores come before the release that tells the others about them.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrived_ptr + seq * KV_HEADS + head, 1, sem="acq_rel")
            if arrived == last - first:
                first_part = 2 * first + (seq_begin > first_begin).to(tl.int32)
                _merge(
                    part_out_ptr,
                    part_lse_ptr,
                    out_ptr + group,
                    head,
                    first,
                    last,
                    first_part,
                    KV_HEADS,
                    GROUP,
                    GROUP_ROWS,
                    D,
                    WIDTH,
                    PARTS,
                )
                tl.store(arrived_ptr + seq * KV_HEADS + head, 0)
        position = stop
        seq += (stop == seq_end).to(tl.int32)
