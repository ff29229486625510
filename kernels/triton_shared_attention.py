"""Paged decode attention in which the decodes of a tile read their common prefix together, once.

The idea is that of Hydragen (Juravsky et al. 2024, arXiv 2402.05099) and of FlashInfer's cascade attention: attention
over a prefix and over what follows it are computed apart and joined by their log-sums, and the queries of all who share
the prefix meet each of its keys in one matrix product. Here both are items on the one line of units that
``triton_attention`` cuts into equal slices: first the sequences' own tokens, then the tiles' prefixes. So it is the
same single launch whatever the groups are, and every block reads the same number of bytes; a decode without a group is
an item like any other. The rows of a tensor-core product are there anyway: a tile of ``ROWS`` of them costs what one
decode costs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from radixserve.kernels.interface import BatchLayout
from radixserve.kernels.shared_prefix import SharedPrefixRule, SharedTiles
from radixserve.kernels.triton_attention import ROWS, DecodeTuning, TritonDecodeAttention, cut
from radixserve.kernels.triton_shared_attention_kernels import decode_shared

PARTS = 4  # of a tile's rows that are loaded at once when they are merged
_FEWEST_ITEMS = 16  # that the plan's kernel is compiled for, so that a few sizes serve all batches
# To leave parts and to merge them takes about as long as reading so many bytes of a layer's KV. Estimated.
_OVERHEAD_BYTES = 16 << 20
_MIN_SAVED_SHARE = 1 / 8
# Who shares a prefix leaves a part for each of its query heads and counts it, so items cost more than sequences do.
_START_UNITS = 12


class TritonSharedAttention:
    """As ``TritonDecodeAttention``, for layers without a window and layouts that have ``shared`` tiles. ``plain`` is
    that kernel for the same model; ``tile_rows`` of queries are multiplied at once."""

    def __init__(
        self,
        plain: TritonDecodeAttention,
        max_seqs: int,
        device: torch.device,
        tile_rows: int = ROWS,
        tuning: DecodeTuning | None = None,
    ) -> None:
        self._plain, self._tile_rows = plain, tile_rows
        self._tuning = tuning or replace(plain.tuning, start_units=_START_UNITS)
        tile_members = tile_rows // plain.group
        value_bytes = (plain.shape.cache_dtype or plain.shape.dtype).itemsize
        token_bytes = 2 * value_bytes * plain.kv_heads * plain.head_dim
        self.rule = SharedPrefixRule(tile_members, _OVERHEAD_BYTES // token_bytes, _MIN_SAVED_SHARE)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_slices = max(1, self._tuning.blocks_per_sm * num_sms // plain.kv_heads)
        max_tiles = max_seqs // 2

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._unit_starts = ints(max_seqs + max_tiles + 2)
        self._slice_items = ints(self._num_slices)
        self._arrived = ints(max_seqs, plain.kv_heads * plain.group)
        # A part for each slice or item that begins, of the sequences and of the tiles.
        self._prefix_lines = (self._num_slices + max_seqs) * plain.kv_heads * plain.group_rows
        lines = self._prefix_lines + (self._num_slices + max_tiles) * plain.kv_heads * tile_rows
        self._part_out = torch.empty(lines, plain.head_dim, dtype=torch.float32, device=device)
        self._part_lse = torch.empty(lines, dtype=torch.float32, device=device)

    def plan_decode(self, layout: BatchLayout, tiles: SharedTiles, num_seqs: int) -> None:
        """As ``TritonDecodeAttention.plan_decode``; ``tiles`` are for ``num_seqs`` decodes."""
        self._layout, self._tiles, self._num_seqs = layout, tiles, num_seqs
        seqs = max(_FEWEST_ITEMS, triton.next_power_of_2(len(tiles.lens)))
        options = {"SEQS": seqs, "WINDOW": 0, "PDL": self._plain.pdl}
        cut(tiles.lens, self._unit_starts, self._slice_items, num_seqs, self._tuning, **options)

    def run_decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """As ``TritonDecodeAttention.run_decode``."""
        layout, tiles, plain, tuning = self._layout, self._tiles, self._plain, self._tuning
        tensors = (q, k_cache, v_cache, out, layout.page_table, layout.rows, layout.kv_lens, *tiles)
        parts = (self._unit_starts, self._slice_items, self._part_out, self._part_lse, self._arrived)
        numbers = (self._num_seqs, len(tiles.lens), self._num_slices, self._prefix_lines, layout.page_table.stride(0))
        options = {"MEMBERS": self.rule.tile_members, "PAGE": layout.page_size, "ROWS": self._tile_rows}
        options |= {"LANES": 32 * tuning.num_warps, "PARTS": PARTS, "PREFETCH": True}
        options |= {"PDL": plain.pdl, "launch_pdl": plain.pdl}
        constants = {**plain.constants, **tuning.slicing, **tuning.reading, **options}
        decode_shared[(plain.kv_heads, self._num_slices)](*tensors, *parts, *numbers, plain.scale, **constants)
