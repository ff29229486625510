"""CUDA graphs of pure decode steps: the only module that knows them.

A captured step reads its rows and KV lengths from static buffers, so a replay costs the host two small copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixserve.engine.step import Int32s

# rows int32 [S], kv_lens int32 [S] -> token ids [S], failed [S]. Reads no device value on the host, and writes each
# row's last token. A kv_len of 0 marks padding, whose row is the padding row.
DecodeStep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Sizes worth a graph of their own: padding costs at most an eighth above 64 sequences."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    token_ids: Tensor
    failed: Tensor


class DecodeGraphs:
    """Owns one graph for each batch size, their shared memory pool, and the static input and output buffers."""

    def __init__(self, decode: DecodeStep, batch_sizes: Sequence[int], padding_row: int, device: torch.device):
        self._decode = decode
        self._sizes = np.array(sorted(batch_sizes))
        self._padding_row = padding_row
        self._device = device
        self._inputs = torch.zeros(2 * int(self._sizes[-1]), dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}

    def capture(self, report: Callable[[float], None]) -> None:
        """Capture all sizes, the largest first, so that the smaller ones fit into its memory. ``report``: share done.

        Each size runs once beforehand, on padding only, which compiles kernels and stores nothing.
        """
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self._sizes.tolist())):
            rows, kv_lens = self._inputs[:size], self._inputs[size : 2 * size]
            rows.fill_(self._padding_row)
            kv_lens.zero_()
            torch.cuda.synchronize(self._device)
            self._decode(rows, kv_lens)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                token_ids, failed = self._decode(rows, kv_lens)
            self._captured[size] = _Captured(graph, token_ids, failed)
            report((done + 1) / len(self._sizes))

    def fits(self, num_seqs: int) -> bool:
        """Whether a step of that many decodes can be replayed."""
        return 0 < num_seqs <= self._sizes[-1] and bool(self._captured)

    def replay(self, rows: Int32s, kv_lens: Int32s) -> tuple[Tensor, Tensor]:
        """Run a step: token ids and failed, [S] each, static buffers that the next replay of the size overwrites (in
        stream order)."""
        num_seqs = len(rows)
        size = int(self._sizes[np.searchsorted(self._sizes, num_seqs)])
        packed = torch.zeros(2, size, dtype=torch.int32, pin_memory=True)
        host = packed.numpy()
        host[0, :num_seqs], host[0, num_seqs:] = rows, self._padding_row
        host[1, :num_seqs] = kv_lens
        self._inputs[: 2 * size].copy_(packed.view(-1), non_blocking=True)
        captured = self._captured[size]
        captured.graph.replay()
        return captured.token_ids[:num_seqs], captured.failed[:num_seqs]
