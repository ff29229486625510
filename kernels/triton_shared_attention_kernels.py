"""The Triton kernel of decode attention that reads shared prefixes once; ``triton_shared_attention`` explains it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.triton_attention_kernels import attend, inside, prefetch_first_block, start_units


@triton.jit
def _sequence_of(row, item, num_seqs, members_ptr, GROUP: tl.constexpr, MEMBERS: tl.constexpr):
    """The sequence whose query stands in each row of the item's products, -1 where there is none."""
    slot = row // GROUP
    is_tile = item >= num_seqs
    member = tl.load(members_ptr + (item - num_seqs) * MEMBERS + slot, mask=is_tile & (slot < MEMBERS), other=-1)
    return tl.where(is_tile, member, tl.where(slot == 0, item, -1))


@triton.jit
def _parts_of(unit_starts_ptr, lens_ptr, item, exists, total, used, START_UNITS: tl.constexpr):
    """The slice with the first part of each item, and how many slices have one; none where it does not exist."""
    length = tl.load(lens_ptr + item, mask=exists, other=0)
    begin = tl.load(unit_starts_ptr + item, mask=exists, other=0).to(tl.int64) + start_units(length, START_UNITS)
    end = tl.load(unit_starts_ptr + item + 1, mask=exists, other=1).to(tl.int64)
    # Unit u belongs to slice ((u + 1) * used - 1) // total.
    first = ((begin + 1) * used - 1) // total
    last = (end * used - 1) // total
    return first.to(tl.int32), tl.where(exists, last - first + 1, 0).to(tl.int32)


@triton.jit
def _merge_rows(
    part_out_ptr,
    part_lse_ptr,
    prefix_line,  # [ROWS], where the first part of each row's prefix is ...
    prefix_parts,  # ... and how many there are, prefix_step lines apart
    own_line,  # the same of what comes behind the prefix
    own_parts,
    prefix_step,
    own_step,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,  # loaded at once
):
    """Join the parts of each row in the order of its tokens. Rows without parts come out as NaN."""
    dim = tl.arange(0, WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    num_parts = prefix_parts + own_parts
    for start in range(0, tl.max(num_parts, 0), PARTS):
        for ahead in tl.static_range(PARTS):
            part = start + ahead
            live = part < num_parts
            behind = own_line + (part - prefix_parts) * own_step
            line = tl.where(part < prefix_parts, prefix_line + part * prefix_step, behind)
            # Past the L1 cache, which is not coherent: other blocks wrote these.
            lse = tl.load(part_lse_ptr + line, mask=live, other=float("-inf"), cache_modifier=".cg")
            spot = line[:, None] * D + dim[None, :]
            value = tl.load(part_out_ptr + spot, mask=inside(live, D, WIDTH), other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, lse)
            shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
            acc = acc * shrink[:, None] + value * weight[:, None]
            total = total * shrink + weight
            top = new_top
    return acc / total[:, None]


@triton.jit(do_not_specialize=["num_seqs", "num_items", "num_slices", "prefix_lines", "table_stride"])
def decode_shared(
    q_ptr,  # [num_seqs, KV_HEADS * GROUP, D]
    k_ptr,  # [pages, PAGE, KV_HEADS, D]
    v_ptr,
    out_ptr,  # as q
    table_ptr,  # int32 [max_rows, table_stride]
    rows_ptr,  # int32 [num_seqs]
    kv_lens_ptr,  # int32 [num_seqs]
    lens_ptr,  # int32 [num_seqs + tiles], these and the next two as in SharedTiles
    places_ptr,  # int32 [num_seqs]
    members_ptr,  # int32 [tiles * MEMBERS]
    unit_starts_ptr,  # of cut_slices
    slice_items_ptr,
    part_out_ptr,  # fp32 [lines, D]: (num_slices + num_seqs) * KV_HEADS * GROUP_ROWS, then those of the prefixes
    part_lse_ptr,  # fp32 [lines]
    arrived_ptr,  # int32 [num_seqs, KV_HEADS * GROUP], all zero between launches
    num_seqs,
    num_items,
    num_slices,
    prefix_lines,  # where the lines of the prefixes begin
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    MEMBERS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    START_UNITS: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,  # threads of a block
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One slice of one KV head. Items are the sequences' own tokens, then the tiles' prefixes; a part is what one slice
    has of one item, and since a walk along the line passes either a slice or an item, slice + item names it."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    piece = tl.program_id(1)
    total = tl.load(unit_starts_ptr + num_items)
    end_of_own = tl.load(unit_starts_ptr + num_items + 1)
    item = tl.load(slice_items_ptr + piece)
    used = tl.minimum(tl.maximum(total // MIN_UNITS, 1), num_slices)
    position = (piece.to(tl.int64) * total // used).to(tl.int32)
    end = tl.minimum(((piece + 1).to(tl.int64) * total // used).to(tl.int32), total)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    k_ptr += head * D
    v_ptr += head * D
    own_step = KV_HEADS * GROUP_ROWS
    prefix_step = KV_HEADS * ROWS
    if PDL:
        # As in ``decode``: what the host has sent and the plan may be read before the wait.
        if PREFETCH and position < end:
            first_seq = tl.max(_sequence_of(row, item, num_seqs, members_ptr, GROUP, MEMBERS), 0)
            first_kv_len = tl.load(kv_lens_ptr + first_seq)
            first_length = tl.load(lens_ptr + item)
            first_skipped = tl.where(item < num_seqs, first_kv_len - first_length, 0)
            first_units = tl.load(unit_starts_ptr + item) + start_units(first_length, START_UNITS)
            first_row_ptr = table_ptr + tl.load(rows_ptr + first_seq).to(tl.int64) * table_stride
            first = first_skipped + tl.maximum(position - first_units, 0) * UNIT
            prefetch_first_block(k_ptr, v_ptr, first_row_ptr, first, first_kv_len, KV_HEADS * D, D, WIDTH, PAGE, BLOCK)
        gdc_wait()
    while position < end:
        item_begin = tl.load(unit_starts_ptr + item)
        item_end = tl.load(unit_starts_ptr + item + 1)
        stop = tl.minimum(end, item_end)
        is_tile = item >= num_seqs
        seq = _sequence_of(row, item, num_seqs, members_ptr, GROUP, MEMBERS)
        exists = seq >= 0
        any_seq = tl.max(seq, 0)  # all see the same pages here
        length = tl.load(lens_ptr + item)
        tokens_begin = item_begin + start_units(length, START_UNITS)
        skipped = tl.where(is_tile, 0, tl.load(kv_lens_ptr + any_seq) - length)
        query = row % GROUP
        spot = (seq.to(tl.int64) * KV_HEADS + head) * GROUP + query
        spots = spot[:, None] * D + dim[None, :]
        q = tl.load(q_ptr + spots, mask=inside(exists, D, WIDTH), other=0.0)
        row_ptr = table_ptr + tl.load(rows_ptr + any_seq).to(tl.int64) * table_stride
        here = skipped + tl.maximum(position - tokens_begin, 0) * UNIT
        until = skipped + tl.minimum((stop - tokens_begin) * UNIT, length)
        acc, top, weight = attend(
            q, k_ptr, v_ptr, row_ptr, here, until, scale, KV_HEADS * D, D, WIDTH, PAGE, ROWS, BLOCK, STAGES, SOFTCAP
        )
        weight = tl.maximum(weight, 1e-30)
        result = acc / weight[:, None]
        place = tl.load(places_ptr + any_seq)
        if (position <= tokens_begin) & (stop == item_end) & (place < 0):
            tl.store(out_ptr + spots, result.to(out_ptr.dtype.element_ty), mask=inside(exists, D, WIDTH))
        elif stop > tokens_begin:
            own_line = (item + piece) * own_step + head * GROUP_ROWS
            prefix_line = prefix_lines + (item - num_seqs + piece) * prefix_step + head * ROWS
            line = tl.where(is_tile, prefix_line, own_line) + row
            tl.store(part_out_ptr + line[:, None] * D + dim[None, :], result, mask=inside(exists, D, WIDTH))
            tl.store(part_lse_ptr + line, top + tl.log2(weight), mask=exists)
            # Each row is counted by a thread of its own: what an atomic returns is sure to reach only who did it.
            lane = tl.arange(0, LANES)
            lane_seq = _sequence_of(lane, item, num_seqs, members_ptr, GROUP, MEMBERS)
            counts = lane_seq >= 0
            lane_place = tl.load(places_ptr + lane_seq, mask=counts, other=-1)
            _, expected = _parts_of(unit_starts_ptr, lens_ptr, lane_seq, counts, total, used, START_UNITS)
            lane_item = num_seqs + lane_place // MEMBERS
            _, expected_of_prefix = _parts_of(
                unit_starts_ptr, lens_ptr, lane_item, lane_place >= 0, total, used, START_UNITS
            )
            # All threads' stores come before the release that tells the others about them.
            tl.debug_barrier()
            counter = arrived_ptr + (lane_seq * KV_HEADS + head) * GROUP + lane % GROUP
            before = tl.atomic_add(counter, 1, mask=counts, sem="acq_rel")
            last = (counts & (before == expected + expected_of_prefix - 1)).to(tl.int32)
            if tl.max(last, 0) > 0:
                tl.debug_barrier()
                complete = tl.max(tl.where(lane[None, :] == row[:, None], last[None, :], 0), 1) > 0
                places = tl.load(places_ptr + seq, mask=complete, other=-1)
                tile = places // MEMBERS
                prefix_first, prefix_parts = _parts_of(
                    unit_starts_ptr, lens_ptr, num_seqs + tile, places >= 0, total, used, START_UNITS
                )
                own_first, own_parts = _parts_of(unit_starts_ptr, lens_ptr, seq, complete, total, used, START_UNITS)
                slot_row = places % MEMBERS * GROUP + query
                prefix_at = prefix_lines + (tile + prefix_first) * prefix_step + head * ROWS + slot_row
                own_at = (seq + own_first) * own_step + head * GROUP_ROWS + query
                merged = _merge_rows(
                    part_out_ptr,
                    part_lse_ptr,
                    prefix_at,
                    prefix_parts,
                    own_at,
                    own_parts,
                    prefix_step,
                    own_step,
                    ROWS,
                    D,
                    WIDTH,
                    PARTS,
                )
                tl.store(out_ptr + spots, merged.to(out_ptr.dtype.element_ty), mask=inside(complete, D, WIDTH))
                tl.store(arrived_ptr + spot, 0, mask=complete)
        position = stop
        item += (stop == item_end).to(tl.int32)
        item = tl.where((item >= end_of_own) & (item < num_seqs), num_seqs, item)  # past the padding
