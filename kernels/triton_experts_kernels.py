"""Kernels of a mixture of experts on CUDA; ``triton_experts.py`` says what they are to each other."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.triton_quantized import widen


@triton.jit(do_not_specialize=["num_tokens"])
def route(
    scores_ptr,  # fp32 [T, EXPERTS]
    slots_ptr,  # int64 [T], below 0 for tokens of nobody
    weights_ptr,  # fp32 [T, TOP] out
    chosen_ptr,  # int32 [T, TOP] out: experts from the best on; EXPERTS for tokens of nobody
    counts_ptr,  # int32 [programs, WIDTH] out if COUNT: pairs of each expert
    num_tokens,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two >= EXPERTS
    TOP: tl.constexpr,
    TOP_WIDTH: tl.constexpr,  # a power of two >= TOP
    ROWS: tl.constexpr,
    NORMALIZED: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Softmax, and the best experts of ROWS tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, WIDTH)
    place = tl.arange(0, TOP_WIDTH)
    # Written when the step began, at least two kernels ago.
    is_real = tl.load(slots_ptr + row, mask=row < num_tokens, other=-1) >= 0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    spot = row[:, None] * EXPERTS + expert[None, :]
    inside = (row < num_tokens)[:, None] & (expert < EXPERTS)[None, :]
    score = tl.load(scores_ptr + spot, mask=inside, other=float("-inf"))
    # Whatever the scores are, NaN included, TOP different experts are chosen.
    left = tl.where((expert < EXPERTS)[None, :], tl.where(score > -1e30, score, -1e30), float("-inf"))
    top = tl.max(left, 1)
    total = tl.sum(tl.exp(left - top[:, None]), 1)
    values = tl.full([ROWS, TOP_WIDTH], float("-inf"), tl.float32)
    chosen = tl.full([ROWS, TOP_WIDTH], 0, tl.int32)
    counts = tl.zeros([WIDTH], tl.int32)
    for rank in tl.static_range(TOP):
        best = tl.max(left, 1)
        where = tl.argmax(left, 1)
        values = tl.where((place == rank)[None, :], best[:, None], values)
        chosen = tl.where((place == rank)[None, :], where[:, None], chosen)
        taken = expert[None, :] == where[:, None]
        left = tl.where(taken, float("-inf"), left)
        if COUNT:
            counts += tl.sum((taken & is_real[:, None]).to(tl.int32), 0)
    weights = tl.exp(values - top[:, None])
    if NORMALIZED:
        total = tl.sum(weights, 1)
    out = row[:, None] * TOP + place[None, :]
    kept = (row < num_tokens)[:, None] & (place < TOP)[None, :]
    tl.store(weights_ptr + out, weights / total[:, None], mask=kept)
    tl.store(chosen_ptr + out, tl.where(is_real[:, None], chosen, EXPERTS), mask=kept)
    if COUNT:
        tl.store(counts_ptr + tl.program_id(0) * WIDTH + expert, counts)


@triton.jit(do_not_specialize=["num_tokens", "num_pieces", "max_blocks"])
def sort(
    chosen_ptr,  # int32 [T, TOP]
    counts_ptr,  # int32 [num_pieces, WIDTH], of each ROWS tokens
    pairs_ptr,  # int32 [T * TOP] out: pairs token * TOP + rank by expert
    blocks_ptr,  # int32 [3, max_blocks] out: expert, first index into pairs, rows (0: idle)
    num_tokens,
    num_pieces,
    max_blocks,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A counting sort: one program places the pairs of ROWS tokens, and describes its share of the blocks."""
    piece = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    line = tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([WIDTH], tl.int32)
    before = tl.zeros([WIDTH], tl.int32)
    for start in range(0, num_pieces, ROWS):
        other = start + line
        counts = tl.load(
            counts_ptr + other[:, None] * WIDTH + expert[None, :], mask=(other < num_pieces)[:, None], other=0
        )
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < piece)[:, None], counts, 0), 0)
    ends = tl.cumsum(total, 0)
    row = piece * ROWS + line
    goes = tl.zeros([ROWS, WIDTH], tl.int32)
    pair = tl.zeros([ROWS, WIDTH], tl.int32)
    for rank in tl.static_range(TOP):
        chosen = tl.load(chosen_ptr + row * TOP + rank, mask=row < num_tokens, other=WIDTH)
        match = (chosen[:, None] == expert[None, :]).to(tl.int32)
        goes += match
        pair += match * (row * TOP + rank)[:, None]
    # Tokens of nobody may name a column of the table in which no expert is.
    goes = tl.where((total > 0)[None, :], goes, 0)
    spot = (ends - total + before)[None, :] + tl.cumsum(goes, 0) - goes
    tl.store(pairs_ptr + spot, pair, mask=goes > 0)
    blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
    block_ends = tl.cumsum(blocks, 0)
    for start in range(piece * ROWS, max_blocks, num_pieces * ROWS):
        block = start + line
        mine = tl.sum((block_ends[None, :] <= block[:, None]).to(tl.int32), 1)
        is_mine = expert[None, :] == mine[:, None]
        nth = block - tl.sum(tl.where(is_mine, (block_ends - blocks)[None, :], 0), 1)
        end = tl.sum(tl.where(is_mine, ends[None, :], 0), 1)
        first = end - tl.sum(tl.where(is_mine, total[None, :], 0), 1) + nth * BLOCK_ROWS
        rows = tl.where(mine < WIDTH, tl.minimum(end - first, BLOCK_ROWS), 0)
        inside = block < max_blocks
        tl.store(blocks_ptr + block, mine, mask=inside)
        tl.store(blocks_ptr + max_blocks + block, first, mask=inside)
        tl.store(blocks_ptr + 2 * max_blocks + block, rows, mask=inside)


@triton.jit
def _sorted_block(pairs_ptr, blocks_ptr, block, max_blocks, ROWS: tl.constexpr):
    """A block as ``sort`` has described it: the expert, whether there is one, the pair of each row, and which rows
    have one."""
    expert = tl.load(blocks_ptr + block, cache_modifier=".cg")
    first = tl.load(blocks_ptr + max_blocks + block, cache_modifier=".cg")
    rows = tl.load(blocks_ptr + 2 * max_blocks + block, cache_modifier=".cg")
    row = tl.arange(0, ROWS)
    live = row < rows
    return expert, rows > 0, tl.load(pairs_ptr + first + row, mask=live, other=0, cache_modifier=".cg"), live


@triton.jit
def _products(
    x_ptrs,  # [ROWS, DEPTH]
    weight_ptrs,  # [COLUMNS, DEPTH]; GATED: of the gates, N * K before the others
    live,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """x times the weights, and times the gates if GATED, fp32 [ROWS, COLUMNS] both."""
    k = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    gate_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        inside = (start + k < K)[None, :]
        x = tl.load(x_ptrs + start, mask=live[:, None] if WHOLE else live[:, None] & inside, other=0.0)
        weight = _load(weight_ptrs + start + (N * K if GATED else 0), inside, WHOLE)
        acc = tl.dot(x, tl.trans(weight), acc)
        if GATED:
            gate_acc = tl.dot(x, tl.trans(_load(weight_ptrs + start, inside, WHOLE)), gate_acc)
    return acc, gate_acc


@triton.jit
def _load(ptrs, inside, WHOLE: tl.constexpr):
    return tl.load(ptrs) if WHOLE else tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def _e4m3_products(
    x_ptrs,  # [ROWS, DEPTH]
    weight_ptrs,  # [COLUMNS, DEPTH]; GATED: of the gates, N rows before the others
    scale_ptrs,  # fp32 [COLUMNS], as ``weight_ptrs``; BLOCKED: one, of all columns
    live,
    N,
    K,  # a multiple of DEPTH
    GROUPED: tl.constexpr,
    BLOCKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
):
    """As ``_products``. What a weight stands for without its scale is exact in x's type; scales come to sums."""
    groups = K // DEPTH if GROUPED else 1
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    gate_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    rows = N if GATED else 0  # before those of ``acc``
    scale = tl.load(scale_ptrs + rows * groups) if BLOCKED else 1.0
    gate_scale = tl.load(scale_ptrs) if BLOCKED else 1.0
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        x = tl.load(x_ptrs + start, mask=live[:, None], other=0.0)
        group = start // DEPTH
        spot = rows * groups + group
        part = tl.dot(x, tl.trans(tl.load(weight_ptrs + rows * K + start).to(x.dtype)))
        if BLOCKED:
            acc += part * scale
            scale = tl.load(scale_ptrs + tl.minimum(spot + 1, (rows + 1) * groups - 1))
        else:
            acc += part * tl.load(scale_ptrs + spot)[None, :] if GROUPED else part
        if GATED:
            part = tl.dot(x, tl.trans(tl.load(weight_ptrs + start).to(x.dtype)))
            if BLOCKED:
                gate_acc += part * gate_scale
                gate_scale = tl.load(scale_ptrs + tl.minimum(group + 1, groups - 1))
            else:
                gate_acc += part * tl.load(scale_ptrs + group)[None, :] if GROUPED else part
    if not GROUPED:
        acc *= tl.load(scale_ptrs + rows)[None, :]
        if GATED:
            gate_acc *= tl.load(scale_ptrs)[None, :]
    return acc, gate_acc


@triton.jit
def _nibble_products(
    x_ptrs,  # fp16 [ROWS, DEPTH], in the order of words
    word_ptrs,  # int16 [COLUMNS, DEPTH / 4]; GATED: of the gates, N rows before the others
    scale_ptrs,  # fp32 [COLUMNS], as ``word_ptrs``
    zero_ptrs,  # int8, as ``scale_ptrs``
    live,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
):
    """As ``_products``, with the weights as the left factor: see ``triton_quantized``."""
    groups, words = K // DEPTH, K // 4
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    gate_acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    rows = N if GATED else 0
    for group in tl.range(0, groups, num_stages=STAGES):
        x = tl.load(x_ptrs + group * DEPTH, mask=live[:, None], other=0.0)
        at, spot = group * (DEPTH // 4), rows * groups + group
        acc += _nibble_part(x, word_ptrs + rows * words + at, scale_ptrs + spot, zero_ptrs + spot)
        if GATED:
            gate_acc += _nibble_part(x, word_ptrs + at, scale_ptrs + group, zero_ptrs + group)
    return tl.trans(acc), tl.trans(gate_acc)


@triton.jit
def _nibble_part(x, word_ptrs, scale_ptrs, zero_ptrs):
    weight = widen(tl.load(word_ptrs), tl.load(zero_ptrs).to(tl.float16)[:, None], 4)
    return tl.dot(weight, tl.trans(x)) * tl.load(scale_ptrs)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "max_blocks"])
def multiply(
    x_ptr,  # [T, K] if GATED, else [T * TOP, K]
    x_scale_ptr,  # fp32, of each row of x, if X_SCALED
    weight_ptr,  # [EXPERTS, N, K], or [EXPERTS, 2 N, K] if GATED: first the gates; of 4 bits int16, K / 4
    weight_scale_ptr,  # fp32 [EXPERTS, rows, groups], if BITS < 16
    weight_zero_ptr,  # int8, as the scales, if BITS == 4
    scales_ptr,  # fp32 [T, TOP]: what results are multiplied by, unless GATED
    pairs_ptr,  # of sort
    blocks_ptr,
    out_ptr,  # [T * TOP, N] if GATED, else [TOP, T, N]
    num_tokens,
    max_blocks,
    N,
    K,  # not a constant, or the loop would be unrolled
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,  # blocks that walk together over the columns, so that they find x and weights in the L2 cache
    BITS: tl.constexpr,  # of a weight: 8 (e4m3) or 4; 16: not quantized
    GROUPED: tl.constexpr,  # DEPTH columns of quantized weights share a scale; else a whole row does
    BLOCKED: tl.constexpr,  # and so do the COLUMNS rows of a tile
    X_SCALED: tl.constexpr,  # x is e4m3, or for 4 bits fp16
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,  # K is a multiple of DEPTH
    PDL: tl.constexpr,
):
    """One block of pairs times some columns of its expert."""
    column_tiles = (N + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    within = program % (GROUP * column_tiles)
    block = program // (GROUP * column_tiles) * GROUP + within % GROUP
    first_n = within // GROUP * COLUMNS
    n = first_n + tl.arange(0, COLUMNS)
    width = K // 4 if BITS == 4 else K  # elements of a row of weights
    lane = tl.arange(0, DEPTH // 4 if BITS == 4 else DEPTH)
    safe_n = tl.minimum(n, N - 1)
    if PDL:
        # The gated product is the first: it waits for the routing before it lets the second one start, which therefore
        # may read the routing at once.
        if GATED:
            gdc_wait()
        gdc_launch_dependents()
    block_there = block < max_blocks
    block = tl.minimum(block, max_blocks - 1)
    expert, exists, pair, live = _sorted_block(pairs_ptr, blocks_ptr, block, max_blocks, ROWS)
    exists = exists & block_there
    rows_of_expert = N * 2 if GATED else N
    first_row = expert.to(tl.int64) * rows_of_expert
    expert_ptr = weight_ptr + first_row * width
    if PDL and not GATED:
        gdc_wait()
    if exists:
        x_row = pair // TOP if GATED else pair
        x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * K + tl.arange(0, DEPTH)[None, :]
        weight_ptrs = expert_ptr + safe_n[:, None] * width + lane[None, :]
        if BITS == 16:
            acc, gate = _products(x_ptrs, weight_ptrs, live, N, K, ROWS, COLUMNS, DEPTH, STAGES, GATED, WHOLE)
        else:
            spot = (first_row + (first_n if BLOCKED else safe_n)) * (K // DEPTH if GROUPED else 1)
            scale_ptrs, zero_ptrs = weight_scale_ptr + spot, weight_zero_ptr + spot
            if BITS == 4:
                acc, gate = _nibble_products(
                    x_ptrs, weight_ptrs, scale_ptrs, zero_ptrs, live, N, K, ROWS, COLUMNS, DEPTH, STAGES, GATED
                )
            else:
                acc, gate = _e4m3_products(
                    x_ptrs, weight_ptrs, scale_ptrs, live, N, K, GROUPED, BLOCKED, ROWS, COLUMNS, DEPTH, STAGES, GATED
                )
        if X_SCALED:
            x_scale = tl.load(x_scale_ptr + x_row, mask=live, other=0.0)[:, None]
            acc *= x_scale
            gate *= x_scale
        if GATED:
            result = gate / (1.0 + tl.exp(-gate)) * acc
            line_out = pair.to(tl.int64)
        else:
            result = acc * tl.load(scales_ptr + pair, mask=live, other=0.0)[:, None]
            line_out = (pair % TOP).to(tl.int64) * num_tokens + pair // TOP
        spot = line_out[:, None] * N + n[None, :]
        tl.store(out_ptr + spot, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])
