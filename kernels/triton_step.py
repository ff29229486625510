"""What a decode step needs before its first layer, in one kernel on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    _decode_inputs[(triton.cdiv(size, block),)](
        rows,
        kv_lens,
        page_table,
        last_tokens,
        ids,
        positions,
        slots,
        size,
        page_table.stride(0),
        PAGE=page_size,
        BLOCK=block,
    )
    return ids, positions, slots
