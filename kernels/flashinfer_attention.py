"""Paged attention by FlashInfer: prompt chunks over their cached prefixes, and decodes as chunks of one token.

Its planner runs on the host and needs host lengths, which a ``BatchLayout`` has; it waits for nothing but the upload
of the plan before.
"""

from __future__ import annotations

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from numpy.typing import NDArray
from torch import Tensor

from radixserve.kernels.interface import AttentionShape, BatchLayout

WORKSPACE_BYTES = 256 << 20  # split sequences leave their parts here


class FlashInferAttention:
    """``AttentionKernel`` for any mix of decodes and chunks. Owns FlashInfer's workspace and the plans of the step, one
    for each window of the layers."""

    plans_on_device = False
    shared_prefixes = None

    def __init__(self, shape: AttentionShape, device: torch.device):
        self._shape = shape
        self._device = device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # The layers run one after the other, so all may leave their parts in the same workspace.
        self._wrappers = {
            window: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2") for window in shape.windows
        }
        # A planner reuses one piece of pinned memory, from which its last plan may still be on its way.
        self._planned = torch.cuda.Event()

    def plan(self, layout: BatchLayout) -> None:
        self.plan_from(layout, 0)

    def plan_from(self, layout: BatchLayout, first: int) -> None:
        """Plan the sequences ``first ..`` only; ``run`` then takes their queries only."""
        self._planned.synchronize()
        rows, kv_lens = layout.rows_host[first:], layout.kv_lens_host[first:]
        starts = layout.query_starts_host[first:] - layout.query_starts_host[first]
        num_pages = -(-kv_lens // layout.page_size)
        page_starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(num_pages, dtype=np.int32)))
        table = layout.page_table_host
        pages = np.concatenate([table[row, :count] for row, count in zip(rows, num_pages, strict=True)])
        page_ids = _to_device(pages, self._device)
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                torch.from_numpy(starts.astype(np.int32)),
                torch.from_numpy(page_starts),
                page_ids,
                torch.from_numpy(((kv_lens - 1) % layout.page_size + 1).astype(np.int32)),
                self._shape.num_heads,
                self._shape.num_kv_heads,
                self._shape.head_dim,
                layout.page_size,
                causal=True,
                sm_scale=self._shape.score_scale,
                window_left=-1 if window is None else window - 1,  # tokens before the query's own
                logits_soft_cap=self._shape.softcap,
                q_data_type=self._shape.dtype,
                kv_data_type=self._shape.dtype,
                max_token_per_sequence=int(np.diff(starts).max()),
                seq_lens=torch.from_numpy(kv_lens.astype(np.int32)),
            )
        self._planned.record()

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> Tensor:
        out = torch.empty_like(q)
        self.run_into(q, k_cache, v_cache, out, window)
        return out

    def run_into(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, window: int | None = None) -> None:
        """As ``run``, into ``out`` [queries of the plan, q_heads, D]."""
        self._wrappers[window].run(q, (k_cache, v_cache), out=out)


def _to_device(array: NDArray[np.int32], device: torch.device) -> Tensor:
    """Asynchronous: the pinned memory is handed out again only when the copy is done."""
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
