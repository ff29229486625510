"""CUDA graphs of steps: the only module that knows them.

A captured step reads what changes from static buffers, so a replay costs the host one small copy. Steps of decodes
alone are captured whole, sampling included; steps that also hold prompt chunks up to their final hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixserve.engine.step import Int32s, StepPlan
from radixserve.engine.step_inputs import PaddedSize, StepInputs, pad, upload

# rows int32 [S], kv_lens int32 [S] -> a tensor. Reads no device value on the host. A kv_len of 0 marks padding, whose
# row is the padding row.
DecodeStep = Callable[[Tensor, Tensor], Tensor]
# Inputs, padded to a size -> final hidden states [tokens, H]. Reads no device value on the host.
MixedStep = Callable[[StepInputs[Tensor], PaddedSize], Tensor]
# Of a captured mixed step. Longer contexts want a kernel that shares them out, and more chunks are long steps.
_MAX_CHUNKS = 32
_MAX_CONTEXT = 8192
# The host launches longer steps one kernel at a time as fast as the device runs them.
_MAX_TOKENS = 2048
_TOKEN_COUNTS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, _MAX_TOKENS)

_ALIGNMENT = 4  # int32s: kernels are compiled for 16-byte aligned tensors, and compiled anew where one is not


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Sizes worth a graph of their own: padding costs at most an eighth above 64 sequences."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_token_counts(step_tokens: int) -> list[int]:
    """Sizes of steps with prompt chunks worth a graph of their own, where no step has more than ``step_tokens``."""
    largest = min(step_tokens, _MAX_TOKENS)
    return [count for count in _TOKEN_COUNTS if count < largest] + [largest]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: Tensor


def _capture(step: Callable[[], Tensor], pool: Any) -> _Captured:
    """Runs ``step`` once beforehand, which compiles its kernels. ``pool``: a handle of the memory that graphs share,
    since they never run at the same time."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = step()
    return _Captured(graph, output)


class DecodeGraphs:
    """Owns one graph for each batch size, and the static input and output buffers."""

    def __init__(self, decode: DecodeStep, batch_sizes: Sequence[int], padding_row: int, device: torch.device):
        self._decode = decode
        self._sizes = np.array(sorted(batch_sizes))
        self._padding_row = padding_row
        self._device = device
        self._inputs = torch.zeros(2 * _aligned(int(self._sizes[-1])), dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}

    def capture(self, pool: Any, report: Callable[[float], None]) -> None:
        """Capture all sizes, the largest first, so that the smaller ones fit into its memory. ``report``: share done.

        Each size also runs, on padding only, which stores nothing.
        """
        for done, size in enumerate(reversed(self._sizes.tolist())):
            rows, kv_lens = self._views(size)
            rows.fill_(self._padding_row)
            kv_lens.zero_()
            self._captured[size] = _capture(partial(self._decode, rows, kv_lens), pool)
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


class MixedGraphs:
    """Owns one graph for each number of tokens, and the static input and output buffers."""

    def __init__(self, forward: MixedStep, token_counts: Sequence[int], max_decodes: int, device: torch.device):
        self._forward = forward
        self._counts = np.array(sorted(token_counts))
        self._max_decodes = max_decodes
        self._device = device
        nothing = np.zeros(0, np.int32)
        self._idle = StepInputs(nothing, nothing, nothing, nothing, nothing, np.zeros(1, np.int32), *[nothing] * 3)
        largest = pad(self._idle, 0, self._size_for(int(self._counts[-1])))
        self._buffer = torch.zeros(sum(_aligned(len(array)) for array in largest), dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}

    def capture(self, pool: Any, report: Callable[[float], None]) -> None:
        """As ``DecodeGraphs.capture``."""
        for done, count in enumerate(reversed(self._counts.tolist())):
            size = self._size_for(count)
            inputs = upload(pad(self._idle, 0, size), self._device, self._buffer)
            self._captured[count] = _capture(partial(self._forward, inputs, size), pool)
            report((done + 1) / len(self._counts))

    def fits(self, plan: StepPlan) -> bool:
        """Whether ``plan``, which has chunks, can be replayed."""
        context = max(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)
        return plan.num_tokens <= self._counts[-1] and len(plan.chunks) <= _MAX_CHUNKS and context <= _MAX_CONTEXT

    def replay(self, host: StepInputs[Int32s], num_decodes: int) -> tuple[StepInputs[Tensor], Tensor]:
        """Run a step. Returns its padded inputs and final hidden states: static buffers that the next replay overwrites
        (in stream order)."""
        size = self._size_for(len(host.ids))
        inputs = upload(pad(host, num_decodes, size), self._device, self._buffer)
        captured = self._captured[size.tokens]
        captured.graph.replay()
        return inputs, captured.output

    def _size_for(self, num_tokens: int) -> PaddedSize:
        tokens = int(self._counts[np.searchsorted(self._counts, num_tokens)])
        return PaddedSize(tokens, min(tokens, self._max_decodes), min(tokens, _MAX_CHUNKS))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
