"""Attention of a mixed step by two kernels: one made for single queries, one for prompt chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from radixserve.kernels.interface import BatchLayout, PlannedAttention
from radixserve.kernels.shared_prefix import SharedPrefixRule
from radixserve.kernels.triton_attention import TritonDecodeAttention
from radixserve.kernels.triton_extend import TritonExtendAttention
from radixserve.kernels.triton_shared_attention import TritonSharedAttention


class SplitAttention:
    """``AttentionKernel``: decodes by ``decodes`` or, in layers without a window of steps whose layout names shared
    prefixes, by ``shared``; chunks by ``chunks``, or by ``unplanned_chunks`` where there is no such kernel or the step
    is planned on the device, so that ``plan`` and ``run`` may be captured in a CUDA graph."""

    plans_on_device = True

    def __init__(
        self,
        decodes: TritonDecodeAttention,
        chunks: PlannedAttention | None,
        unplanned_chunks: TritonExtendAttention,
        shared: TritonSharedAttention | None = None,
    ):
        self._decodes, self._chunks, self._unplanned_chunks = decodes, chunks, unplanned_chunks
        self._shared = shared

    @property
    def shared_prefixes(self) -> SharedPrefixRule | None:
        return None if self._shared is None else self._shared.rule

    def plan(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._has_chunks = layout.rows.shape[0] > layout.num_decodes
        self._planned = self._chunks if self._has_chunks and len(layout.rows_host) else None
        if layout.num_decodes:
            self._decodes.plan_decode(layout, layout.num_decodes)
        if layout.shared is not None and self._shared is not None:
            self._shared.plan_decode(layout, layout.shared, layout.num_decodes)
        if self._planned is not None:
            self._planned.plan_from(layout, layout.num_decodes)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> Tensor:
        out = torch.empty_like(q)
        split = self._layout.num_decodes
        if self._layout.shared is not None and self._shared is not None and window is None:
            self._shared.run_decode(q[:split], k_cache, v_cache, out[:split])
        elif split:
            self._decodes.run_decode(q[:split], k_cache, v_cache, out[:split], window)
        if self._planned is not None:
            self._planned.run_into(q[split:], k_cache, v_cache, out[split:], window)
        elif self._has_chunks:
            self._unplanned_chunks.run(self._layout, q, k_cache, v_cache, out, window)
        return out
