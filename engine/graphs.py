"""CUDA graphs of steps: the only module that knows them.

A captured step reads what changes from static buffers, so a replay costs the host one small copy. Steps of decodes
alone are captured whole, sampling included; steps that also hold prompt chunks up to their final hidden states.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixserve.engine.step import Int32s, StepPlan
from radixserve.engine.step_inputs import PaddedSize, StepInputs, pad, upload
from radixserve.kernels.shared_prefix import NO_GROUPS, PrefixGroups, SharedTiles, pack_tiles, packed_size, unpack_tiles

# rows int32 [S], kv_lens int32 [S], prefixes to read together -> a tensor. Reads no device value on the host. A kv_len
# of 0 marks padding, whose row is the padding row.
DecodeStep = Callable[[Tensor, Tensor, SharedTiles | None], Tensor]
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


def shared_batch_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """Those of ``batch_sizes`` worth a second graph, for steps that read shared prefixes once. Few: the time they save
    is worth some padding, and each takes a while to capture."""
    return [size for size in batch_sizes if size in (8, 16) or size % 32 == 0 or size == max(batch_sizes)]


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
    # What other threads do on the device is not part of it: NCCL's asks for its events all the time.
    with no_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = step()
    return _Captured(graph, output)


def _release(captured: dict[int, _Captured]) -> None:
    for size in list(captured):
        captured.pop(size).graph.reset()


@contextmanager
def no_collection() -> Iterator[None]:
    """Leave cyclic garbage where it is. If it held a graph, an event or device memory, to destroy that would end a
    capture that goes on at the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DecodeGraphs:
    """Owns one graph for each batch size, and the static input and output buffers. With ``tile_members`` the steps are
    those that read prefixes once for tiles of so many decodes."""

    def __init__(
        self,
        decode: DecodeStep,
        batch_sizes: Sequence[int],
        padding_row: int,
        device: torch.device,
        tile_members: int | None = None,
    ):
        self._decode = decode
        self._tile_members = tile_members
        self._sizes = np.array(sorted(batch_sizes))
        self._padding_row = padding_row
        self._device = device
        self._inputs = torch.zeros(self._input_size(int(self._sizes[-1])), dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}

    def capture(self, pool: Any, report: Callable[[float], None]) -> None:
        """Capture all sizes, the largest first, so that the smaller ones fit into its memory. ``report``: share done.

        Each size also runs, on padding only, which stores nothing.
        """
        nobody: Int32s = np.zeros(0, np.int32)
        for done, size in enumerate(reversed(self._sizes.tolist())):
            self._send(size, nobody, nobody, None)
            self._captured[size] = _capture(partial(self._decode, *self._views(size)), pool)
            report((done + 1) / len(self._sizes))

    def release(self) -> None:
        """Destroy the graphs, whoever still knows this object; not to be used again."""
        _release(self._captured)

    def fits(self, num_seqs: int) -> bool:
        """Whether a step of that many decodes can be replayed."""
        return 0 < num_seqs <= self._sizes[-1] and bool(self._captured)

    def replay(self, rows: Int32s, kv_lens: Int32s, groups: PrefixGroups | None = None) -> Tensor:
        """Run a step of S decodes, of which ``groups`` read prefixes together. Returns what the captured step did for S
        sequences or, behind those, some more: a static buffer that the next replay overwrites (in stream order)."""
        size = self._size_for(len(rows))
        self._send(size, rows, kv_lens, groups)
        captured = self._captured[size]
        captured.graph.replay()
        return captured.output

    def inputs(self, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Rows and KV lengths [S] of the last replay, which had ``num_seqs`` sequences."""
        rows, kv_lens, _ = self._views(self._size_for(num_seqs))
        return rows[:num_seqs], kv_lens[:num_seqs]

    def _size_for(self, num_seqs: int) -> int:
        return int(self._sizes[np.searchsorted(self._sizes, num_seqs)])

    def _input_size(self, size: int) -> int:
        """int32s of the inputs of a step of ``size`` decodes."""
        return 2 * _aligned(size) + (packed_size(size, self._tile_members) if self._tile_members else 0)

    def _send(self, size: int, rows: Int32s, kv_lens: Int32s, groups: PrefixGroups | None) -> None:
        """Fill the inputs of a step of ``size`` decodes, in one copy."""
        num_seqs, lens_at = len(rows), _aligned(size)
        # From torch's cache of pinned memory, where it returns once the copy has run.
        packed = torch.empty(self._input_size(size), dtype=torch.int32, pin_memory=True)
        host = packed.numpy()
        host[:num_seqs], host[num_seqs:lens_at] = rows, self._padding_row
        host[lens_at : lens_at + num_seqs], host[lens_at + num_seqs : 2 * lens_at] = kv_lens, 0
        if self._tile_members:
            host[2 * lens_at :] = pack_tiles(groups or NO_GROUPS, kv_lens, size, self._tile_members)
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)

    def _views(self, size: int) -> tuple[Tensor, Tensor, SharedTiles | None]:
        lens_at, end, tiles = _aligned(size), self._input_size(size), None
        if self._tile_members:
            tiles = unpack_tiles(self._inputs[2 * lens_at : end], size, self._tile_members)
        return self._inputs[:size], self._inputs[lens_at : lens_at + size], tiles


class MixedGraphs:
    """Owns one graph for each number of tokens, and the static input and output buffers. With ``tile_members`` all of
    them read prefixes once for tiles of so many decodes, where there are groups."""

    def __init__(
        self,
        forward: MixedStep,
        token_counts: Sequence[int],
        max_decodes: int,
        device: torch.device,
        tile_members: int | None = None,
    ):
        self._forward = forward
        self._counts = np.array(sorted(token_counts))
        self._max_decodes = max_decodes
        self._device = device
        nothing = np.zeros(0, np.int32)
        self._tile_members = tile_members
        self._idle = StepInputs(nothing, nothing, nothing, nothing, nothing, np.zeros(1, np.int32), *[nothing] * 4)
        largest = self._padded(self._idle, 0, self._size_for(int(self._counts[-1])), None)
        self._buffer = torch.zeros(sum(_aligned(len(array)) for array in largest), dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}

    def capture(self, pool: Any, report: Callable[[float], None]) -> None:
        """As ``DecodeGraphs.capture``."""
        for done, count in enumerate(reversed(self._counts.tolist())):
            size = self._size_for(count)
            inputs = upload(self._padded(self._idle, 0, size, None), self._device, self._buffer)
            self._captured[count] = _capture(partial(self._forward, inputs, size), pool)
            report((done + 1) / len(self._counts))

    def release(self) -> None:
        """As of ``DecodeGraphs``."""
        _release(self._captured)

    def fits(self, plan: StepPlan) -> bool:
        """Whether ``plan``, which has chunks, can be replayed."""
        context = max(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)
        return plan.num_tokens <= self._counts[-1] and len(plan.chunks) <= _MAX_CHUNKS and context <= _MAX_CONTEXT

    def replay(
        self, host: StepInputs[Int32s], num_decodes: int, groups: PrefixGroups | None = None
    ) -> tuple[StepInputs[Tensor], Tensor]:
        """Run a step, of whose decodes ``groups`` read prefixes together. Returns its padded inputs and final hidden
        states: static buffers that the next replay overwrites (in stream order)."""
        size = self._size_for(len(host.ids))
        inputs = upload(self._padded(host, num_decodes, size, groups), self._device, self._buffer)
        captured = self._captured[size.tokens]
        captured.graph.replay()
        return inputs, captured.output

    def _padded(
        self, host: StepInputs[Int32s], num_decodes: int, size: PaddedSize, groups: PrefixGroups | None
    ) -> StepInputs[Int32s]:
        padded = pad(host, num_decodes, size)
        if self._tile_members is None:
            return padded
        kv_lens = host.kv_lens[:num_decodes]
        return padded._replace(tiles=pack_tiles(groups or NO_GROUPS, kv_lens, size.decodes, self._tile_members))

    def _size_for(self, num_tokens: int) -> PaddedSize:
        tokens = int(self._counts[np.searchsorted(self._counts, num_tokens)])
        return PaddedSize(tokens, min(tokens, self._max_decodes), min(tokens, _MAX_CHUNKS))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
