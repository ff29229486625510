"""Paged decode attention that needs no host plan: usable inside a CUDA graph whatever the lengths are.

The keys of all sequences form one line of units (``UNIT`` tokens each), cut into equal slices on the device by
``cut_slices``, once a step; one thread block takes one slice of one KV head, so each reads the same number of bytes
however ragged the lengths are (the stream-K idea of Osama et al. 2023, applied to flash-decoding). The blocks of one
slice are neighbours in the grid and walk in step over all heads of a token, which keeps the DRAM rows open. Where a
sequence is cut, the block that arrives last merges the parts in their order, so results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from radixserve.kernels.interface import AttentionShape, BatchLayout
from radixserve.kernels.triton_attention_kernels import cut_slices, decode

UNIT = 16  # tokens: the grain at which work is shared out
ROWS = 16  # rows of the smallest tensor-core product; a KV head's query heads fill the first few
PARTS = 8  # of a sequence that are loaded at once when they are merged
_LOG2_E = 1.4426950408889634  # the kernel works with powers of two


def in_powers_of_two(shape: AttentionShape) -> tuple[float, float]:
    """What the kernels get for ``scale`` and ``softcap``, 0 for none."""
    scale, softcap = shape.score_scale * _LOG2_E, shape.softcap
    return (scale, 0.0) if softcap is None else (scale * 2 / softcap, softcap * _LOG2_E)


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """What was measured best on an H200 for 1 to 256 sequences, 2 and 4 query heads a KV head."""

    block_tokens: int = 32
    num_stages: int = 5  # of which the page lookups take half: two blocks of keys and values are on their way
    num_warps: int = 2
    blocks_per_sm: int = 4
    start_units: int = 4  # so much reading takes as long as to begin with a sequence and to leave its result
    min_slice_units: int = 2  # shorter slices cost more in merging than they win

    @property
    def slicing(self) -> dict[str, int]:
        """Constants of the kernels that know of slices."""
        return {"UNIT": UNIT, "START_UNITS": self.start_units, "MIN_UNITS": self.min_slice_units}

    @property
    def reading(self) -> dict[str, int]:
        """Constants of the kernels that read keys and values."""
        return {"BLOCK": self.block_tokens, "STAGES": self.num_stages, "num_warps": self.num_warps}


def cut(
    lens: Tensor, unit_starts: Tensor, slices: Tensor, num_decodes: int, tuning: DecodeTuning, **options: int
) -> None:
    """Launch ``cut_slices`` for items of ``lens`` tokens, the first of them ``num_decodes`` decodes. ``options``: the
    constants SEQS, WINDOW and PDL."""
    block, num_slices = 16, len(slices)
    numbers = (len(lens), num_decodes, num_slices)
    options |= {"BLOCK": block, "launch_pdl": options["PDL"]}
    cut_slices[(triton.cdiv(num_slices, block),)](lens, unit_starts, slices, *numbers, **tuning.slicing, **options)


class TritonDecodeAttention:
    """One query token per sequence over its pages. Owns the workspace, sized for ``max_seqs`` sequences.

    ``plan_decode`` launches one small kernel and reads no device value, so it may itself be captured in a graph,
    before the layers; the layers of one step share its result. With ``pdl`` (programmatic dependent launch) a kernel
    starts before the one ahead of it has ended and reads the plan, lengths and page table at once: at least one
    ordinary kernel must lie between them and ``run_decode``, as the embedding does.
    """

    def __init__(
        self,
        shape: AttentionShape,
        max_seqs: int,
        device: torch.device,
        pdl: bool = True,
        tuning: DecodeTuning | None = None,
    ) -> None:
        assert shape.num_heads % shape.num_kv_heads == 0 and shape.num_heads // shape.num_kv_heads <= ROWS
        self.shape, self.kv_heads, self.head_dim = shape, shape.num_kv_heads, shape.head_dim
        self.group = shape.num_heads // self.kv_heads
        self.group_rows = triton.next_power_of_2(self.group)
        self.pdl, self.tuning = pdl, tuning or DecodeTuning()
        self.scale, softcap = in_powers_of_two(shape)
        heads = {"KV_HEADS": self.kv_heads, "GROUP": self.group, "GROUP_ROWS": self.group_rows}
        width = triton.next_power_of_2(self.head_dim)
        self.constants = {**heads, "D": self.head_dim, "WIDTH": width, "SOFTCAP": softcap}
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_slices = max(1, self.tuning.blocks_per_sm * num_sms // self.kv_heads)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._cuts = {window: (ints(max_seqs + 2), ints(self.num_slices)) for window in shape.windows}
        self._arrived = ints(max_seqs, self.kv_heads)
        part = (2 * self.num_slices, self.kv_heads, self.group_rows)
        self._part_out = torch.empty(*part, self.head_dim, dtype=torch.float32, device=device)
        self._part_lse = torch.empty(*part, dtype=torch.float32, device=device)

    def plan_decode(self, layout: BatchLayout, num_seqs: int) -> None:
        """Cut the work of the first ``num_seqs`` sequences of ``layout`` into slices on the device, for each window."""
        self._layout, self._num_seqs = layout, num_seqs
        lens, num_items = layout.kv_lens[:num_seqs], triton.next_power_of_2(num_seqs)
        for window, (unit_starts, slices) in self._cuts.items():
            options = {"SEQS": num_items, "WINDOW": window or 0, "PDL": self.pdl}
            cut(lens, unit_starts, slices, num_seqs, self.tuning, **options)

    def run_decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, window: int | None = None) -> None:
        """q, out [num_seqs, q_heads, D]; caches of one layer [pages, page_size, kv_heads, D]; all contiguous.
        Nothing is written for sequences of length 0, which are padding.
        ``window``: how many tokens a query sees, one of those given at the start."""
        layout = self._layout
        tensors = (q, k_cache, v_cache, out, layout.page_table, layout.rows, layout.kv_lens, *self._cuts[window])
        parts = (self._part_out, self._part_lse, self._arrived)
        numbers = (self._num_seqs, self.num_slices, layout.page_table.stride(0), self.scale)
        options = {"PAGE": layout.page_size, "ROWS": ROWS, "PARTS": PARTS, "WINDOW": window or 0}
        # Small batches wait for latency, not for bandwidth: there the look-ups cost more than they win.
        options |= {"PREFETCH": self._num_seqs >= 8, "PDL": self.pdl, "launch_pdl": self.pdl}
        # As many bytes on their way, whatever a token has.
        options["BLOCK"] = self.tuning.block_tokens * q.element_size() // k_cache.element_size()
        constants = {**self.constants, **self.tuning.slicing, **self.tuning.reading, **options}
        decode[(self.kv_heads, self.num_slices)](*tensors, *parts, *numbers, **constants)
