"""Attention of a mixed step by two kernels: one made for single queries, one for prompt chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from radixserve.kernels.flashinfer_attention import FlashInferAttention
from radixserve.kernels.interface import BatchLayout
from radixserve.kernels.triton_attention import TritonDecodeAttention


class SplitAttention:
    """``AttentionKernel``: decodes by ``decodes``, chunks by ``chunks``. A step of decodes only needs no host plan, so
    its ``plan`` and ``run`` may be captured in a CUDA graph."""

    plans_on_device = True

    def __init__(self, decodes: TritonDecodeAttention, chunks: FlashInferAttention):
        self._decodes, self._chunks = decodes, chunks
        self._num_decodes = self._num_sequences = 0

    def plan(self, layout: BatchLayout) -> None:
        self._num_decodes, self._num_sequences = layout.num_decodes, layout.rows.shape[0]
        if self._num_decodes:
            self._decodes.plan_decode(layout, self._num_decodes)
        if self._num_sequences > self._num_decodes:
            self._chunks.plan_from(layout, self._num_decodes)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> Tensor:
        out = torch.empty_like(q)
        split = self._num_decodes
        if split:
            self._decodes.run_decode(q[:split], k_cache, v_cache, out[:split], window)
        if self._num_sequences > split:
            self._chunks.run_into(q[split:], k_cache, v_cache, out[split:], window)
        return out
