"""Paged attention in plain torch: any device, and the oracle that faster kernels are tested against.

Each sequence gathers its keys and values once a layer and attends with torch's fused attention, which reads strided
heads and shares key-value heads without copies. Short decodes of similar length share a call, because a call costs more
than their work; long ones are faster one by one, while what they gathered is still in the processor's cache. Which way
a decode goes depends on its own length alone, so its result depends neither on its batch nor on the page size.

Unless it shares a prefix with others and the layout says so: then all of them attend to that in one call, each to the
rest of its own tokens as above, and the two are joined by their log-sums (Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from radixserve.kernels.interface import AttentionShape, BatchLayout
from radixserve.kernels.quantized import FP8
from radixserve.kernels.shared_prefix import SharedPrefixRule, SharedTiles

# Measured on a CPU, see benchmarks/notes/cpu_runner.md; in tokens.
_LONGEST_SHARED = 128
_SHARED_STEP = 32  # lengths that share a call are rounded up to multiples of it
_GATHERED_AT_ONCE = 1024
_SHARED_PREFIXES = SharedPrefixRule(tile_members=64, min_saved_tokens=512, min_saved_share=0.25)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """n decodes of one padded length L, or one tile of decodes with a prefix of L tokens (then n is 1); ``queries`` are
    the decodes' places in T."""

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
    tiles: list[_DecodeGroup]
    chunks: list[_Chunk]


class TorchAttention:
    """``AttentionKernel`` on torch's scaled dot-product attention; holds the plans of the current step, one for each
    window of the layers."""

    plans_on_device = False

    def __init__(self, shape: AttentionShape, device: torch.device, *, reads_shared: bool = False):
        # torch tells the log-sums on the CPU only, and not for capped scores; windows hide prefixes.
        can_share = reads_shared and device.type == "cpu" and shape.softcap is None and None in shape.windows
        self.shared_prefixes = _SHARED_PREFIXES if can_share else None
        self._shape = shape
        self._device = device
        self._plans: dict[int | None, _Plan] = {}

    def plan(self, layout: BatchLayout) -> None:
        chunks = range(layout.num_decodes, len(layout.rows_host))
        for window in self._shape.windows:
            planned = [self._plan_chunk(layout, sequence, window) for sequence in chunks]
            kv_lens, tiles = layout.kv_lens_host[: layout.num_decodes], []
            seen = kv_lens if window is None else np.minimum(kv_lens, window)
            if layout.shared is not None and window is None:
                seen, tiles = layout.shared.lens[: len(kv_lens)].numpy(), self._plan_tiles(layout, layout.shared)
            self._plans[window] = _Plan(self._plan_decodes(layout, seen), tiles, planned)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> Tensor:
        keys, values = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        plan = self._plans[window]
        if plan.tiles:
            self._decode_shared(plan, q, keys, values, out)
        else:
            for group in plan.decodes:
                out[group.queries] = self._decode(group, q[group.queries], keys, values)
        for chunk in plan.chunks:
            out[chunk.first : chunk.last] = self._prefill(chunk, q[chunk.first : chunk.last], keys, values)
        return out

    def _plan_tiles(self, layout: BatchLayout, shared: SharedTiles) -> list[_DecodeGroup]:
        lens = shared.lens[layout.num_decodes :].tolist()
        tiles = []
        for tile in range(len(lens) - lens.count(0)):
            decodes = shared.members[tile][shared.members[tile] >= 0].long()
            slots = _slots(layout, layout.rows_host[int(decodes[0])], np.arange(lens[tile]))
            tiles.append(_DecodeGroup(decodes, self._to_device(slots), mask=None, num_sequences=1))
        return tiles

    def _plan_decodes(self, layout: BatchLayout, lens: NDArray[np.int32]) -> list[_DecodeGroup]:
        """``lens`` [num_decodes]: the last tokens of each decode that it sees."""
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
        slots = self._to_device(_slots(layout, layout.rows_host[sequence], positions))
        return _DecodeGroup(slice(sequence, sequence + 1), slots, mask=None, num_sequences=1)

    def _plan_shared(
        self, layout: BatchLayout, sequences: NDArray[np.intp], seen: NDArray[np.int32], length: int
    ) -> _DecodeGroup:
        # Padding reads the sequence's own last token: never another request's values, finite or not.
        unseen = layout.kv_lens_host[sequences, None] - seen
        positions = unseen + np.minimum(np.arange(length), seen - 1)
        slots = self._to_device(_slots(layout, layout.rows_host[sequences, None], positions).reshape(-1))
        mask = self._mask(np.arange(length) < seen)[:, None, None]
        return _DecodeGroup(self._to_device(sequences), slots, mask, num_sequences=len(sequences))

    def _plan_chunk(self, layout: BatchLayout, sequence: int, window: int | None) -> _Chunk:
        first, last = (int(start) for start in layout.query_starts_host[sequence : sequence + 2])
        kv_len = int(layout.kv_lens_host[sequence])
        first_query = kv_len - (last - first)
        window = min(window or kv_len, kv_len)
        positions = np.arange(max(0, first_query - window + 1), kv_len)
        is_plain = first_query == 0 and window == kv_len and self._shape.softcap is None
        slots = self._to_device(_slots(layout, layout.rows_host[sequence], positions))
        mask = None if is_plain else self._mask(_visible(np.arange(first_query, kv_len), positions, window))
        return _Chunk(first, last, slots, mask)

    def _decode(self, group: _DecodeGroup, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Query heads that share a key-value head stand in for the query positions of one head."""
        n, shape = group.num_sequences, self._shape
        grouped = q.reshape(n, shape.num_kv_heads, -1, shape.head_dim)
        k, v = self._gather(group, keys), self._gather(group, values)
        return self._attend(grouped, k, v, group.mask).reshape(q.shape)

    def _decode_shared(self, plan: _Plan, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """The decodes of a plan with tiles, into ``out``."""
        kv_heads, dim = keys.shape[1:]
        lse = torch.empty(q.shape[:2])
        for group in plan.decodes:
            grouped = q[group.queries].reshape(group.num_sequences, kv_heads, -1, dim)
            own, own_lse = self._attend_with_lse(grouped, group, keys, values)
            out[group.queries], lse[group.queries] = own.reshape(-1, *q.shape[1:]), own_lse.reshape(-1, q.shape[1])
        for tile in plan.tiles:
            # Of all members the query heads that share a key-value head: [1, kv_heads, members * group, D].
            members = q[tile.queries].view(-1, kv_heads, q.shape[1] // kv_heads, dim)
            stacked = members.transpose(0, 1).reshape(1, kv_heads, -1, dim)
            prefix, prefix_lse = self._attend_with_lse(stacked, tile, keys, values)
            prefix = prefix.view(kv_heads, *members.shape[:1], -1, dim).transpose(0, 1).reshape(-1, *q.shape[1:])
            prefix_lse = prefix_lse.view(kv_heads, len(members), -1).transpose(0, 1).reshape(-1, q.shape[1])
            weight = torch.sigmoid(prefix_lse - lse[tile.queries])[..., None]
            out[tile.queries] = torch.lerp(out[tile.queries].float(), prefix.float(), weight).to(out.dtype)

    def _attend_with_lse(self, q: Tensor, group: _DecodeGroup, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of q [n, kv_heads, Q, D], and the logarithms of its sums of exponentials [n, kv_heads, Q], fp32. It
        is what torch's fused attention does on the CPU, but that keeps these to itself."""
        k, v = self._gather(group, keys), self._gather(group, values)
        mask, scale = group.mask, self._shape.scale
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found: tuple[Tensor, Tensor] = attend(q, k, v, attn_mask=mask, scale=scale)
        return found

    def _gather(self, group: _DecodeGroup, cache: Tensor) -> Tensor:
        """[n, kv_heads, L, D] of a cache [slots, kv_heads, D]."""
        found = _tokens(cache, group.slots, self._shape.dtype)
        return found.view(group.num_sequences, -1, *cache.shape[1:]).transpose(1, 2)

    def _prefill(self, chunk: _Chunk, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        k, v = (_tokens(kv, chunk.slots, q.dtype).transpose(0, 1)[None] for kv in (keys, values))
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


def _tokens(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [L, kv_heads, D] at ``slots`` of a cache [slots, kv_heads, D]."""
    if cache.dtype != FP8:
        return cache.index_select(0, slots)
    return cache.view(torch.uint8).index_select(0, slots).view(FP8).to(dtype)  # e4m3 is not gathered on every device


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
