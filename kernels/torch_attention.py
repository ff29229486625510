"""Paged attention in plain torch: any device, and the oracle that faster kernels are tested against.

Each sequence gathers its keys and values once a layer and attends with torch's fused attention, which reads strided
heads and shares key-value heads without copies. Decodes of similar length share one call. The padded length depends on
the sequence alone, so the result of a decode does not depend on who else is in the batch, nor on the page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from radixserve.kernels.interface import AttentionShape, BatchLayout

_SMALLEST_LENGTH = 64  # tokens


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decodes padded to one length L. ``queries`` [n]: their places in T, None when they are all of T."""

    queries: Tensor | None
    slots: Tensor  # int64 [n * L]
    mask: Tensor  # [n, 1, 1, L], added to the scores: 0 or -inf
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
        if len(self._decodes) == 1 and self._decodes[0].queries is None:
            return self._decode(self._decodes[0], q, keys, values)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._decodes:
            assert group.queries is not None
            out.index_copy_(0, group.queries, self._decode(group, q.index_select(0, group.queries), keys, values))
        for chunk in self._chunks:
            out[chunk.first : chunk.last] = self._prefill(chunk, q[chunk.first : chunk.last], keys, values)
        return out

    def _plan_decodes(self, layout: BatchLayout) -> list[_DecodeGroup]:
        lens = layout.kv_lens_host[: layout.num_decodes]
        padded_lens = _padded_lengths(lens)
        lengths = np.unique(padded_lens)
        all_in_one = len(lengths) == 1 and layout.num_decodes == layout.query_starts_host[-1]
        return [
            self._plan_group(layout, np.flatnonzero(padded_lens == length), int(length), all_in_one)
            for length in lengths
        ]

    def _plan_group(
        self, layout: BatchLayout, sequences: NDArray[np.intp], length: int, is_whole_step: bool
    ) -> _DecodeGroup:
        kv_lens = layout.kv_lens_host[sequences, None]
        # Padding reads the sequence's own last token: never another request's values, finite or not.
        positions = np.minimum(np.arange(length), kv_lens - 1)
        return _DecodeGroup(
            queries=None if is_whole_step else self._to_device(sequences),
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


def _padded_lengths(kv_lens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Round up to four lengths per octave: at most a fifth of a gather is padding, and groups stay few."""
    floored = np.maximum(kv_lens.astype(np.int64), _SMALLEST_LENGTH)
    step = 2 ** (np.frexp(floored - 1)[1].astype(np.int64) - 3)
    padded: NDArray[np.int64] = -(-floored // step) * step
    return padded


def _slots(layout: BatchLayout, rows: NDArray[np.int32] | np.int32, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Slots of token positions; ``rows`` broadcasts against ``positions``."""
    pages = layout.page_table_host[rows, positions // layout.page_size].astype(np.int64)
    slots: NDArray[np.int64] = pages * layout.page_size + positions % layout.page_size
    return slots
