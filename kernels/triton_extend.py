"""Paged attention of prompt chunks over their cached prefixes that needs no host plan: usable inside a CUDA graph
whatever the chunks are. FlashAttention-2 (Dao 2023) with the query heads of a KV head packed into one tile.

A context is not shared out over blocks, so long ones are better left to a kernel that is planned.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixserve.kernels.interface import AttentionShape, BatchLayout
from radixserve.kernels.triton_attention import in_powers_of_two
from radixserve.kernels.triton_attention_kernels import inside

_ROWS = 64  # of a tile: pairs of token and query head; 128 are no faster in steps of up to 2,048 tokens
_KEY_VALUES = 64 * 128  # of the keys that are loaded at once


class TritonExtendAttention:
    """Attention of the chunks of a layout. The queries of chunk c are the tokens ``query_starts[c] ..``; a chunk may be
    empty. With ``pdl`` it reads the layout before the kernel ahead has ended, as ``TritonDecodeAttention`` does."""

    def __init__(self, shape: AttentionShape, pdl: bool = True) -> None:
        assert shape.num_heads % shape.num_kv_heads == 0
        self._kv_heads, self._group, self._pdl = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, pdl
        self._head_dim = shape.head_dim
        self._scale, self._softcap = in_powers_of_two(shape)

    def run(
        self, layout: BatchLayout, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, window: int | None = None
    ) -> None:
        """q, out [T, q_heads, D]: only the rows of chunks are read and written. All tensors contiguous. ``window``: how
        many tokens a query sees."""
        first = layout.num_decodes
        chunks = layout.rows.shape[0] - first
        # Each chunk may leave its last tile partly empty.
        tiles = triton.cdiv(q.shape[0] * self._group, _ROWS) + chunks
        width = triton.next_power_of_2(self._head_dim)
        tensors = (q, k_cache, v_cache, out, layout.page_table, layout.rows, layout.kv_lens, layout.query_starts)
        heads = {"KV_HEADS": self._kv_heads, "GROUP": self._group, "D": self._head_dim, "WIDTH": width}
        blocks = {"CHUNKS": triton.next_power_of_2(chunks), "ROWS": _ROWS, "KEYS": min(64, _KEY_VALUES // width)}
        scores = {"WINDOW": window or 0, "SOFTCAP": self._softcap}
        launch = {"PDL": self._pdl, "launch_pdl": self._pdl, "num_warps": 8 if self._head_dim > 128 else 4}
        numbers = (first, chunks, layout.page_table.stride(0), self._scale)
        _extend[(self._kv_heads, tiles)](
            *tensors, *numbers, **heads, PAGE=layout.page_size, **blocks, **scores, **launch
        )


@triton.jit(do_not_specialize=["first", "chunks", "table_stride"])
def _extend(
    q_ptr,  # [T, KV_HEADS * GROUP, D]
    k_ptr,  # [pages, PAGE, KV_HEADS, D]
    v_ptr,
    out_ptr,  # as q
    table_ptr,  # int32 [max_rows, table_stride]
    rows_ptr,  # int32 [first + chunks]
    kv_lens_ptr,  # int32 [first + chunks]
    starts_ptr,  # int32 [first + chunks + 1]
    first,  # sequences before the chunks
    chunks,
    table_stride,
    scale,  # as of ``decode``
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two >= D
    PAGE: tl.constexpr,
    CHUNKS: tl.constexpr,  # a power of two >= chunks
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # a query sees so many tokens; 0: all before it
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one chunk and KV head; the tiles of all chunks stand in one line, behind it the idle ones."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    tile = tl.program_id(1)
    chunk = tl.arange(0, CHUNKS)
    start = tl.load(starts_ptr + first + chunk, mask=chunk < chunks, other=0)
    stop = tl.load(starts_ptr + first + chunk + 1, mask=chunk < chunks, other=0)
    tiles = ((stop - start) * GROUP + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, 0)
    mine = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    is_mine = chunk == mine
    if PDL:
        # Idle blocks wait too: the kernel after this one relies on all kernels before it being done.
        gdc_wait()
    if mine < chunks:
        first_row = (tile - tl.sum(tl.where(is_mine, tile_ends - tiles, 0), 0)) * ROWS
        begin = tl.sum(tl.where(is_mine, start, 0), 0)
        count = tl.sum(tl.where(is_mine, stop - start, 0), 0)
        kv_len = tl.load(kv_lens_ptr + first + mine)
        table_row_ptr = table_ptr + tl.load(rows_ptr + first + mine).to(tl.int64) * table_stride
        row = first_row + tl.arange(0, ROWS)
        dim = tl.arange(0, WIDTH)
        token = row // GROUP
        position = kv_len - count + token
        line = (begin + token).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
        spot = line[:, None] * D + dim[None, :]
        live = inside(token < count, D, WIDTH)
        # e4m3 becomes fp16 in half the instructions that bf16 takes.
        dtype: tl.constexpr = tl.float16 if k_ptr.dtype.element_ty == tl.float8e4nv else q_ptr.dtype.element_ty
        q = tl.load(q_ptr + spot, mask=live, other=0.0).to(dtype)
        top = tl.full([ROWS], -1e30, tl.float32)  # finite, since a window may leave a row none of the first keys
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        end = tl.minimum(kv_len, kv_len - count + (first_row + ROWS - 1) // GROUP + 1)
        begin_key = tl.maximum(kv_len - count + first_row // GROUP - WINDOW + 1, 0) // KEYS * KEYS if WINDOW else 0
        for base in tl.range(begin_key, end, KEYS, num_stages=3):
            key = base + tl.arange(0, KEYS)
            page = tl.load(table_row_ptr + key // PAGE, mask=key < end, other=0)
            slot = page.to(tl.int64) * PAGE + key % PAGE
            offset = (slot[:, None] * KV_HEADS + head) * D + dim[None, :]
            k = tl.load(k_ptr + offset, mask=inside(key < end, D, WIDTH), other=0.0).to(dtype)
            score = tl.dot(q, tl.trans(k)) * scale
            if SOFTCAP > 0:
                score = SOFTCAP - 2 * SOFTCAP / (tl.exp2(score) + 1)  # SOFTCAP * tanh
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen &= key[None, :] > position[:, None] - WINDOW
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(score - new_top[:, None])
            total = total * shrink + tl.sum(weight, 1)
            v = tl.load(v_ptr + offset, mask=inside(key < end, D, WIDTH), other=0.0).to(dtype)
            acc = tl.dot(weight.to(dtype), v, acc * shrink[:, None])
            top = new_top
        # Padding may have no keys at all.
        tl.store(out_ptr + spot, (acc / tl.maximum(total, 1e-30)[:, None]).to(out_ptr.dtype.element_ty), mask=live)
