"""CUDA graphs of steps: the only module that knows them.

A captured step reads what changes from static buffers, so a replay costs the host one small copy. Steps of decodes
alone are captured whole, sampling included; steps that also hold prompt chunks up to their final hidden states.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from radixserve.engine.step import Int32s, StepPlan
from radixserve.engine.step_inputs import PaddedSize, StepInputs, pad, upload
from radixserve.kernels.shared_prefix import (
    NO_GROUPS,
    PrefixGroups,
    SharedTiles,
    aligned,
    pack_tiles,
    packed_size,
    unpack_tiles,
)

# rows int32 [S], kv_lens int32 [S], prefixes to read together -> a tensor. Reads no device value on the host. A kv_len
# of 0 marks padding, whose row is the padding row.
DecodeStep = Callable[[Tensor, Tensor, SharedTiles | None], Tensor]
# Inputs, padded to a size -> final hidden states [tokens, H]. Reads no device value on the host.
MixedStep = Callable[[StepInputs[Tensor], PaddedSize], Tensor]
Step = TypeVar("Step", DecodeStep, MixedStep)

_NOTHING: Int32s = np.zeros(0, np.int32)
_IDLE = StepInputs(
    _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, np.zeros(1, np.int32), _NOTHING, _NOTHING, _NOTHING, _NOTHING
)
# Of a captured mixed step. Longer contexts want a kernel that shares them out, and more chunks are long steps.
_MAX_CHUNKS = 32
_MAX_CONTEXT = 8192
# The host launches longer steps one kernel at a time as fast as the device runs them.
_MAX_TOKENS = 2048
_TOKEN_COUNTS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, _MAX_TOKENS)


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Sizes worth a graph of their own: padding costs at most an eighth above 64 sequences."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def shared_batch_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """Those of ``batch_sizes`` worth a second graph, for steps that read shared prefixes once. Few: the time they save
    is worth some padding, and each takes a while to capture."""
    return [size for size in batch_sizes if size in (8, 16) or size % 32 == 0 or size == max(batch_sizes)]


def mixed_token_counts(step_tokens: int, fits: Callable[[int], bool] = lambda count: True) -> list[int]:
    """Sizes of steps with prompt chunks worth a graph of their own, where no step has more than ``step_tokens``: those
    that ``fits``, or all if there are none."""
    largest = min(step_tokens, _MAX_TOKENS)
    counts = [count for count in _TOKEN_COUNTS if count < largest] + [largest]
    return list(filter(fits, counts)) or counts


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


class _Graphs(Generic[Step]):
    """Owns one graph of ``step`` for each of ``sizes``, and the static input and output buffers. The row after the
    ``max_rows`` is that of padding. With ``tile_members`` prefixes are read once for tiles of so many decodes."""

    def __init__(
        self, step: Step, sizes: Sequence[int], max_rows: int, device: torch.device, tile_members: int | None = None
    ):
        self._step: Step = step
        self._sizes, self._max_rows, self._device = np.array(sorted(sizes)), max_rows, device
        self._tile_members = tile_members
        self._buffer = torch.zeros(self._input_size(int(self._sizes[-1])), dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}

    def capture(self, pool: Any, report: Callable[[float], None]) -> None:
        """Capture all sizes, the largest first, so that the smaller ones fit into its memory. ``report``: share done.

        Each size also runs, on padding only, which stores nothing.
        """
        for done, size in enumerate(reversed(self._sizes.tolist())):
            self._captured[size] = _capture(self._on_padding(size), pool)
            report((done + 1) / len(self._sizes))

    def release(self) -> None:
        """Destroy the graphs, whoever still knows this object; not to be used again."""
        for size in list(self._captured):
            self._captured.pop(size).graph.reset()

    def _input_size(self, size: int) -> int:
        """int32s of the inputs of a step of ``size``."""
        raise NotImplementedError

    def _on_padding(self, size: int) -> Callable[[], Tensor]:
        """The step of ``size`` on the buffer, which holds padding now."""
        raise NotImplementedError

    def _size_for(self, count: int) -> int:
        return int(self._sizes[np.searchsorted(self._sizes, count)])

    def _replay(self, size: int) -> Tensor:
        captured = self._captured[size]
        captured.graph.replay()
        return captured.output


class DecodeGraphs(_Graphs[DecodeStep]):
    """Of steps of decodes alone, by how many there are. With ``tile_members`` all of them read prefixes together."""

    def fits(self, num_seqs: int) -> bool:
        """Whether a step of that many decodes can be replayed."""
        return 0 < num_seqs <= self._sizes[-1] and bool(self._captured)

    def replay(self, rows: Int32s, kv_lens: Int32s, groups: PrefixGroups | None = None) -> Tensor:
        """Run a step of S decodes, of which ``groups`` read prefixes together. Returns what the captured step did for S
        sequences or, behind those, some more: a static buffer that the next replay overwrites (in stream order)."""
        size = self._size_for(len(rows))
        self._send(size, rows, kv_lens, groups)
        return self._replay(size)

    def inputs(self, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Rows and KV lengths [S] of the last replay, which had ``num_seqs`` sequences."""
        rows, kv_lens, _ = self._views(self._size_for(num_seqs))
        return rows[:num_seqs], kv_lens[:num_seqs]

    def _input_size(self, size: int) -> int:
        return 2 * aligned(size) + (packed_size(size, self._tile_members) if self._tile_members else 0)

    def _on_padding(self, size: int) -> Callable[[], Tensor]:
        self._send(size, _NOTHING, _NOTHING, None)
        return partial(self._step, *self._views(size))

    def _send(self, size: int, rows: Int32s, kv_lens: Int32s, groups: PrefixGroups | None) -> None:
        """Fill the inputs of a step of ``size`` decodes, in one copy."""
        num_seqs, lens_at = len(rows), aligned(size)
        # From torch's cache of pinned memory, where it returns once the copy has run.
        packed = torch.empty(self._input_size(size), dtype=torch.int32, pin_memory=True)
        host = packed.numpy()
        host[:num_seqs], host[num_seqs:lens_at] = rows, self._max_rows
        host[lens_at : lens_at + num_seqs], host[lens_at + num_seqs : 2 * lens_at] = kv_lens, 0
        if self._tile_members:
            host[2 * lens_at :] = pack_tiles(groups or NO_GROUPS, kv_lens, size, self._tile_members)
        self._buffer[: len(packed)].copy_(packed, non_blocking=True)

    def _views(self, size: int) -> tuple[Tensor, Tensor, SharedTiles | None]:
        lens_at, end, tiles = aligned(size), self._input_size(size), None
        if self._tile_members:
            tiles = unpack_tiles(self._buffer[2 * lens_at : end], size, self._tile_members)
        return self._buffer[:size], self._buffer[lens_at : lens_at + size], tiles


class MixedGraphs(_Graphs[MixedStep]):
    """Of steps with prompt chunks, by their number of tokens. With ``tile_members`` all of them read prefixes together
    where there are groups."""

    def fits(self, plan: StepPlan) -> bool:
        """Whether ``plan``, which has chunks, can be replayed."""
        context = max(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)
        return plan.num_tokens <= self._sizes[-1] and len(plan.chunks) <= _MAX_CHUNKS and context <= _MAX_CONTEXT

    def replay(
        self, host: StepInputs[Int32s], num_decodes: int, groups: PrefixGroups | None = None
    ) -> tuple[StepInputs[Tensor], Tensor]:
        """Run a step, of whose decodes ``groups`` read prefixes together. Returns its padded inputs and final hidden
        states: static buffers that the next replay overwrites (in stream order)."""
        size = self._size_for(len(host.ids))
        inputs = upload(self._padded(host, num_decodes, size, groups), self._device, self._buffer)
        return inputs, self._replay(size)

    def _input_size(self, size: int) -> int:
        return sum(aligned(len(array)) for array in self._padded(_IDLE, 0, size, None))

    def _on_padding(self, size: int) -> Callable[[], Tensor]:
        inputs = upload(self._padded(_IDLE, 0, size, None), self._device, self._buffer)
        return partial(self._step, inputs, self._room(size))

    def _padded(
        self, host: StepInputs[Int32s], num_decodes: int, size: int, groups: PrefixGroups | None
    ) -> StepInputs[Int32s]:
        room = self._room(size)
        padded = pad(host, num_decodes, room)
        if self._tile_members is None:
            return padded
        kv_lens = host.kv_lens[:num_decodes]
        return padded._replace(tiles=pack_tiles(groups or NO_GROUPS, kv_lens, room.decodes, self._tile_members))

    def _room(self, size: int) -> PaddedSize:
        return PaddedSize(size, min(size, self._max_rows), min(size, _MAX_CHUNKS))
