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
    slots: Tensor  # int64 [L], of the tokens that some query sees
    mask: Tensor | None  # [queries, L], added to the scores


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step of the layers of one window."""

    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]


class TorchAttention:
    """``AttentionKernel`` on torch's scaled dot-product attention; holds the plans of the current step, one for each
    window of the layers."""

    plans_on_device = False
    shared_prefixes = None

    def __init__(self, shape: AttentionShape, device: torch.device):
        self._shape = shape
        self._device = device
        self._plans: dict[int | None, _Plan] = {}

    def plan(self, layout: BatchLayout) -> None:
        chunks = range(layout.num_decodes, len(layout.rows_host))
        for window in self._shape.windows:
            planned = [self._plan_chunk(layout, sequence, window) for sequence in chunks]
            self._plans[window] = _Plan(self._plan_decodes(layout, window), planned)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> Tensor:
        keys, values = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._plans[window].decodes:
            out[group.queries] = self._decode(group, q[group.queries], keys, values)
        for chunk in self._plans[window].chunks:
            out[chunk.first : chunk.last] = self._prefill(chunk, q[chunk.first : chunk.last], keys, values)
        return out

    def _plan_decodes(self, layout: BatchLayout, window: int | None) -> list[_DecodeGroup]:
        kv_lens = layout.kv_lens_host[: layout.num_decodes]
        lens = kv_lens if window is None else np.minimum(kv_lens, window)  # of what is seen
        groups = [self._plan_long(layout, int(s), int(lens[s])) for s in np.flatnonzero(lens > _LONGEST_SHARED)]
        padded_lens = -(-lens // _SHARED_STEP) * _SHARED_STEP
        for length in range(_SHARED_STEP, _LONGEST_SHARED + 1, _SHARED_STEP):
            sequences, at_once = np.flatnonzero(padded_lens == length), _GATHERED_AT_ONCE // length
            for first in range(0, len(sequences), at_once):
                shared = sequences[first : first + at_once]
                groups.append(self._plan_shared(layout, shared, lens[shared, None], length))
        return groups

    def _plan_long(self, layout: BatchLayout, sequence: int, seen: int) -> _DecodeGroup:
        kv_len = layout.kv_lens_host[sequence]
        positions = np.arange(kv_len - seen, kv_len)
        return _DecodeGroup(
            queries=slice(sequence, sequence + 1),
            slots=self._to_device(_slots(layout, layout.rows_host[sequence], positions)),
            mask=None,
            num_sequences=1,
        )

    def _plan_shared(
        self, layout: BatchLayout, sequences: NDArray[np.intp], seen: NDArray[np.int32], length: int
    ) -> _DecodeGroup:
        # Padding reads the sequence's own last token: never another request's values, finite or not.
        unseen = layout.kv_lens_host[sequences, None] - seen
        positions = unseen + np.minimum(np.arange(length), seen - 1)
        return _DecodeGroup(
            queries=self._to_device(sequences),
            slots=self._to_device(_slots(layout, layout.rows_host[sequences, None], positions).reshape(-1)),
            mask=self._mask(np.arange(length) < seen)[:, None, None],
            num_sequences=len(sequences),
        )

    def _plan_chunk(self, layout: BatchLayout, sequence: int, window: int | None) -> _Chunk:
        first, last = (int(start) for start in layout.query_starts_host[sequence : sequence + 2])
        kv_len = int(layout.kv_lens_host[sequence])
        first_query = kv_len - (last - first)
        window = min(window or kv_len, kv_len)
        positions = np.arange(max(0, first_query - window + 1), kv_len)
        is_plain = first_query == 0 and window == kv_len and self._shape.softcap is None
        return _Chunk(
            first=first,
            last=last,
            slots=self._to_device(_slots(layout, layout.rows_host[sequence], positions)),
            mask=None if is_plain else self._mask(_visible(np.arange(first_query, kv_len), positions, window)),
        )

    def _decode(self, group: _DecodeGroup, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Query heads that share a key-value head stand in for the query positions of one head."""
        n, shape = group.num_sequences, self._shape
        k, v = (kv.index_select(0, group.slots).view(n, -1, *kv.shape[1:]).transpose(1, 2) for kv in (keys, values))
        grouped = q.reshape(n, shape.num_kv_heads, -1, shape.head_dim)
        return self._attend(grouped, k, v, group.mask).reshape(q.shape)

    def _prefill(self, chunk: _Chunk, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        k, v = (kv.index_select(0, chunk.slots).transpose(0, 1)[None] for kv in (keys, values))
        return self._attend(q.transpose(0, 1)[None], k, v, chunk.mask, is_causal=chunk.mask is None)[0].transpose(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
        """q [n, q_heads, Q, D]; k, v [n, kv_heads, L, D]; ``mask`` is added to the scores."""
        softcap, num_shared = self._shape.softcap, q.shape[1] // k.shape[1]
        if softcap is None:
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=is_causal, scale=self._shape.scale, enable_gqa=num_shared > 1
            )
        k, v = k.repeat_interleave(num_shared, dim=1), v.repeat_interleave(num_shared, dim=1)
        scores = torch.matmul(q, k.transpose(2, 3)).float() * (self._shape.score_scale / softcap)
        scores = scores.tanh_().mul_(softcap)
        weights = (scores if mask is None else scores.add_(mask)).softmax(-1)
        return torch.matmul(weights.to(v.dtype), v)

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        allowed = self._to_device(visible)
        zeros = torch.zeros(allowed.shape, dtype=self._shape.dtype, device=self._device)
        return zeros.masked_fill_(~allowed, -torch.inf)

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _visible(queries: NDArray[np.int64], positions: NDArray[np.int64], window: int) -> NDArray[np.bool_]:
    """Which positions each query sees: [queries, positions]."""
    distances = queries[:, None] - positions
    seen: NDArray[np.bool_] = (distances >= 0) & (distances < window)
    return seen


def _slots(layout: BatchLayout, rows: NDArray[np.int32] | np.int32, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Slots of token positions; ``rows`` broadcasts against ``positions``."""
    pages = layout.page_table_host[rows, positions // layout.page_size].astype(np.int64)
    slots: NDArray[np.int64] = pages * layout.page_size + positions % layout.page_size
    return slots
