"""CUDA graphs of pure decode steps: the only module that knows them.

A captured step reads its rows and KV lengths from static buffers, so a replay costs the host one small copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixserve.engine.step import Int32s

# rows int32 [S], kv_lens int32 [S] -> a tensor. Reads no device value on the host. A kv_len of 0 marks padding, whose
# row is the padding row.
DecodeStep = Callable[[Tensor, Tensor], Tensor]

_ALIGNMENT = 4  # int32s: kernels are compiled for 16-byte aligned tensors, and compiled anew where one is not


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Sizes worth a graph of their own: padding costs at most an eighth above 64 sequences."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: Tensor


class DecodeGraphs:
    """Owns one graph for each batch size, their shared memory pool, and the static input and output buffers."""

    def __init__(self, decode: DecodeStep, batch_sizes: Sequence[int], padding_row: int, device: torch.device):
        self._decode = decode
        self._sizes = np.array(sorted(batch_sizes))
        self._padding_row = padding_row
        self._device = device
        self._inputs = torch.zeros(2 * _aligned(int(self._sizes[-1])), dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}

    def capture(self, report: Callable[[float], None]) -> None:
        """Capture all sizes, the largest first, so that the smaller ones fit into its memory. ``report``: share done.

        Each size runs once beforehand, on padding only, which compiles kernels and stores nothing.
        """
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self._sizes.tolist())):
            rows, kv_lens = self._views(size)
            rows.fill_(self._padding_row)
            kv_lens.zero_()
            self._decode(rows, kv_lens)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._decode(rows, kv_lens)
            self._captured[size] = _Captured(graph, output)
            report((done + 1) / len(self._sizes))

    def fits(self, num_seqs: int) -> bool:
        """Whether a step of that many decodes can be replayed."""
        return 0 < num_seqs <= self._sizes[-1] and bool(self._captured)

    def replay(self, rows: Int32s, kv_lens: Int32s) -> Tensor:
        """Run a step of S decodes. Returns what the captured step did for S sequences or, behind those, some more: a
        static buffer that the next replay overwrites (in stream order)."""
        num_seqs = len(rows)
        size = self._size_for(num_seqs)
        lens_at = _aligned(size)
        # From torch's cache of pinned memory, where it returns once the copy has run.
        packed = torch.empty(lens_at + size, dtype=torch.int32, pin_memory=True)
        host = packed.numpy()
        host[:num_seqs], host[num_seqs:size] = rows, self._padding_row
        host[lens_at : lens_at + num_seqs], host[lens_at + num_seqs :] = kv_lens, 0
        self._inputs[: lens_at + size].copy_(packed, non_blocking=True)
        captured = self._captured[size]
        captured.graph.replay()
        return captured.output

    def inputs(self, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Rows and KV lengths [S] of the last replay, which had ``num_seqs`` sequences."""
        rows, kv_lens = self._views(self._size_for(num_seqs))
        return rows[:num_seqs], kv_lens[:num_seqs]

    def _size_for(self, num_seqs: int) -> int:
        return int(self._sizes[np.searchsorted(self._sizes, num_seqs)])

    def _views(self, size: int) -> tuple[Tensor, Tensor]:
        lens_at = _aligned(size)
        return self._inputs[:size], self._inputs[lens_at : lens_at + size]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
