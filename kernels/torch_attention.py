"""Paged attention in plain torch: any device, and the oracle that faster kernels are tested against.

Each sequence gathers its keys and values once a layer and attends with torch's fused attention, which reads strided
heads and shares key-value heads without copies. Short decodes of similar length share a call, because a call costs more
than their work; long ones are faster one by one, while what they gathered is still in the processor's cache. Which way
a decode goes depends on its own length alone, so its result depends neither on its batch nor on the page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from radixserve.kernels.interface import AttentionShape, BatchLayout

# Measured on a CPU, see benchmarks/notes/cpu_runner.md; in tokens.
_LONGEST_SHARED = 128
_SHARED_STEP = 32  # lengths that share a call are rounded up to multiples of it
_GATHERED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """n decodes of one padded length L; ``queries`` are their places in T."""

    queries: Tensor | slice
    slots: Tensor  # int64 [n * L]
    mask: Tensor | None  # [n, 1, 1, L], added to the scores: 0 or -inf; None where nothing is padded
    num_sequences: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Prompt tokens of one sequence. ``mask`` is None where plain causal masking is right (nothing before them)."""

    first: int
    last: int
    slots: Tensor  # int64 [kv_len]
    mask: Tensor | None  # [queries, kv_len], added to the scores


class TorchAttention:
    """``AttentionKernel`` on torch's scaled dot-product attention; holds the plan of the current step."""

    plans_on_device = False

    def __init__(self, shape: AttentionShape, device: torch.device):
        self._shape = shape
        self._device = device
        self._decodes: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []

    def plan(self, layout: BatchLayout) -> None:
        self._decodes = self._plan_decodes(layout)
        self._chunks = [self._plan_chunk(layout, s) for s in range(layout.num_decodes, len(layout.rows_host))]

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        keys, values = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._decodes:
            out[group.queries] = self._decode(group, q[group.queries], keys, values)
        for chunk in self._chunks:
            out[chunk.first : chunk.last] = self._prefill(chunk, q[chunk.first : chunk.last], keys, values)
        return out

    def _plan_decodes(self, layout: BatchLayout) -> list[_DecodeGroup]:
        lens = layout.kv_lens_host[: layout.num_decodes]
        groups = [self._plan_long(layout, int(sequence)) for sequence in np.flatnonzero(lens > _LONGEST_SHARED)]
        padded_lens = -(-lens // _SHARED_STEP) * _SHARED_STEP
        for length in range(_SHARED_STEP, _LONGEST_SHARED + 1, _SHARED_STEP):
            sequences, at_once = np.flatnonzero(padded_lens == length), _GATHERED_AT_ONCE // length
            for first in range(0, len(sequences), at_once):
                groups.append(self._plan_shared(layout, sequences[first : first + at_once], length))
        return groups

    def _plan_long(self, layout: BatchLayout, sequence: int) -> _DecodeGroup:
        positions = np.arange(layout.kv_lens_host[sequence])
        return _DecodeGroup(
            queries=slice(sequence, sequence + 1),
            slots=self._to_device(_slots(layout, layout.rows_host[sequence], positions)),
            mask=None,
            num_sequences=1,
        )

    def _plan_shared(self, layout: BatchLayout, sequences: NDArray[np.intp], length: int) -> _DecodeGroup:
        kv_lens = layout.kv_lens_host[sequences, None]
        # Padding reads the sequence's own last token: never another request's values, finite or not.
        positions = np.minimum(np.arange(length), kv_lens - 1)
        return _DecodeGroup(
            queries=self._to_device(sequences),
            slots=self._to_device(_slots(layout, layout.rows_host[sequences, None], positions).reshape(-1)),
            mask=self._mask(np.arange(length) < kv_lens)[:, None, None],
            num_sequences=len(sequences),
        )

    def _plan_chunk(self, layout: BatchLayout, sequence: int) -> _Chunk:
        first, last = (int(start) for start in layout.query_starts_host[sequence : sequence + 2])
        kv_len = int(layout.kv_lens_host[sequence])
        positions = np.arange(kv_len)
        query_positions = np.arange(kv_len - (last - first), kv_len)
        return _Chunk(
            first=first,
            last=last,
            slots=self._to_device(_slots(layout, layout.rows_host[sequence], positions)),
            mask=None if last - first == kv_len else self._mask(positions <= query_positions[:, None]),
        )

    def _decode(self, group: _DecodeGroup, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Query heads that share a key-value head stand in for the query positions of one head."""
        n, shape = group.num_sequences, self._shape
        k, v = (kv.index_select(0, group.slots).view(n, -1, *kv.shape[1:]).transpose(1, 2) for kv in (keys, values))
        grouped = q.reshape(n, shape.num_kv_heads, -1, shape.head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask).reshape(q.shape)

    def _prefill(self, chunk: _Chunk, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        k, v = (kv.index_select(0, chunk.slots).transpose(0, 1)[None] for kv in (keys, values))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        allowed = self._to_device(visible)
        zeros = torch.zeros(allowed.shape, dtype=self._shape.dtype, device=self._device)
        return zeros.masked_fill_(~allowed, -torch.inf)

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _slots(layout: BatchLayout, rows: NDArray[np.int32] | np.int32, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Slots of token positions; ``rows`` broadcasts against ``positions``."""
    pages = layout.page_table_host[rows, positions // layout.page_size].astype(np.int64)
    slots: NDArray[np.int64] = pages * layout.page_size + positions % layout.page_size
    return slots
