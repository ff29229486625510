"""The numbers of a step plan as flat arrays, laid out on the host and sent to the device in one copy; page tables."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.engine.step import Int32s, StepPlan
from radixserve.engine.transfer import to_device
from radixserve.kernels.shared_prefix import aligned


class PageTable:
    """The runner's, on the device for the kernels, with a mirror on the host for planners.

    ``host`` and ``tensor``: int32 [max_rows, max_pages], the same memory on the CPU."""

    def __init__(self, max_rows: int, max_pages: int, device: torch.device):
        self.host: Int32s = np.zeros((max_rows, max_pages), np.int32)
        self.tensor = torch.from_numpy(self.host).to(device)
        self._device = device

    def write(self, rows: Int32s, cols: Int32s, page_ids: Int32s) -> None:
        """Set ``table[row, col] = page``, on the device in the order of the current stream: one copy, one scatter."""
        self.host[rows, cols] = page_ids
        count = len(rows)
        if self._device.type == "cpu" or not count:
            return
        packed = np.empty(3 * count, np.int32)
        packed[: 2 * count].view(np.int64)[:] = rows.astype(np.int64) * self.host.shape[1] + cols
        # A cell written twice has its last value both times, so that the order of writes on the device does not matter.
        packed[2 * count :] = self.host[rows, cols]
        on_device = to_device(packed, self._device)
        self.tensor.view(-1).index_copy_(0, on_device[: 2 * count].view(torch.int64), on_device[2 * count :])


Array = TypeVar("Array", Int32s, Tensor)


class StepInputs(NamedTuple, Generic[Array]):
    """int32 throughout. T tokens, S sequences (decodes, then chunks), N samples."""

    ids: Array  # [T]; -1 - row for a decode: that row's last token
    positions: Array  # [T]
    slots: Array  # [T]
    rows: Array  # [S]
    kv_lens: Array  # [S], with this step's tokens
    query_starts: Array  # [S + 1]
    sample_tokens: Array  # [N], where in T the sampled sequences end
    sample_rows: Array  # [N]
    sample_lens: Array  # [N], tokens known before the sampled one
    tiles: Array  # as from ``pack_tiles``; empty where no prefix is read for several decodes together


def lay_out(plan: StepPlan, page_table: Int32s, page_size: int) -> StepInputs[Int32s]:
    """``page_table`` [max_rows, max_pages] already has the plan's writes."""
    chunks = plan.chunks
    num_decodes = len(plan.decode_rows)
    chunk_lens = np.array([len(chunk.token_ids) for chunk in chunks], np.int32)
    chunk_starts = np.array([chunk.start for chunk in chunks], np.int32)
    rows = np.concatenate((plan.decode_rows, np.array([chunk.row for chunk in chunks], np.int32)))
    query_lens = np.concatenate((np.ones(num_decodes, np.int32), chunk_lens))
    kv_lens = np.concatenate((plan.decode_lens, chunk_starts + chunk_lens))
    query_starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(query_lens, dtype=np.int32)))
    first_positions = kv_lens - query_lens
    positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(first_positions - query_starts[:-1], query_lens)
    pages = page_table[np.repeat(rows, query_lens), positions // page_size]
    samples = np.flatnonzero([True] * num_decodes + [chunk.samples for chunk in chunks])
    return StepInputs(
        ids=np.concatenate([-1 - plan.decode_rows, *(chunk.token_ids for chunk in chunks)]),
        positions=positions,
        slots=pages * page_size + positions % page_size,
        rows=rows,
        kv_lens=kv_lens,
        query_starts=query_starts,
        sample_tokens=query_starts[1:][samples] - 1,
        sample_rows=rows[samples],
        sample_lens=kv_lens[samples],
        tiles=np.zeros(0, np.int32),
    )


@dataclass(frozen=True, slots=True)
class PaddedSize:
    """What a step of a fixed size has room for."""

    tokens: int
    decodes: int
    chunks: int


def pad(host: StepInputs[Int32s], num_decodes: int, size: PaddedSize) -> StepInputs[Int32s]:
    """The same step with arrays of fixed lengths. Tokens that are padding have slot -1, decodes KV length 0, and chunks
    no queries; sequence ``size.decodes`` is the first chunk, whose tokens still follow those of the real decodes."""
    num_chunks = len(host.rows) - num_decodes
    sequences = size.decodes + size.chunks
    places = np.concatenate((np.arange(num_decodes), size.decodes + np.arange(num_chunks)))

    def filled(array: Int32s, length: int, value: int = 0, at: slice | NDArray[np.intp] | None = None) -> Int32s:
        result = np.full(length, value, np.int32)
        result[slice(len(array)) if at is None else at] = array
        return result

    return StepInputs(
        ids=filled(host.ids, size.tokens),
        positions=filled(host.positions, size.tokens),
        slots=filled(host.slots, size.tokens, -1),
        rows=filled(host.rows, sequences, at=places),
        kv_lens=filled(host.kv_lens, sequences, at=places),
        query_starts=filled(host.query_starts[:-1], sequences + 1, int(host.query_starts[-1]), at=places),
        sample_tokens=filled(host.sample_tokens, sequences),
        sample_rows=filled(host.sample_rows, sequences),
        sample_lens=filled(host.sample_lens, sequences),
        tiles=host.tiles,
    )


def upload(host: StepInputs[Int32s], device: torch.device, into: Tensor | None = None) -> StepInputs[Tensor]:
    """One copy (``into`` a buffer, if given); the results are views of it, each aligned to 16 bytes: kernels are
    compiled for aligned tensors, and compiled anew where one is not."""
    starts = np.concatenate(([0], np.cumsum([aligned(len(array)) for array in host])))
    packed = np.zeros(starts[-1], np.int32)
    for start, array in zip(starts[:-1], host, strict=True):
        packed[start : start + len(array)] = array
    on_device = to_device(packed, device, into)
    return StepInputs(*(on_device[start : start + len(a)] for start, a in zip(starts[:-1].tolist(), host, strict=True)))
