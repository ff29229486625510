"""The flat arrays of a step, and how they get to the device."""

from __future__ import annotations

import numpy as np
import torch

from radixserve.engine.step import PrefillChunk, StepPlan
from radixserve.engine.step_inputs import PaddedSize, PageTable, lay_out, pad, upload

CPU = torch.device("cpu")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def mixed_plan() -> StepPlan:
    """Two decodes, a chunk that goes on later and one that ends; pages of 4 tokens."""
    chunks = (PrefillChunk(2, ints(7, 8, 9), 4, False), PrefillChunk(0, ints(5, 6), 3, True))
    return StepPlan(1, (), ints(), ints(), ints(), ints(3, 1), ints(6, 1), chunks)


def table() -> np.ndarray:
    return np.arange(12, dtype=np.int32).reshape(4, 3) * 10


def test_tokens_find_their_positions_slots_and_sequences() -> None:
    inputs = lay_out(mixed_plan(), table(), 4)
    assert inputs.rows.tolist() == [3, 1, 2, 0] and inputs.kv_lens.tolist() == [6, 1, 7, 5]
    assert inputs.query_starts.tolist() == [0, 1, 2, 5, 7]
    assert inputs.positions.tolist() == [5, 0, 4, 5, 6, 3, 4]
    pages = [100, 30, 70, 70, 70, 0, 10]
    assert inputs.slots.tolist() == [4 * page + at % 4 for page, at in zip(pages, inputs.positions, strict=True)]
    assert inputs.ids.tolist() == [-4, -2, 7, 8, 9, 5, 6]
    assert inputs.sample_tokens.tolist() == [0, 1, 6]
    assert inputs.sample_rows.tolist() == [3, 1, 0] and inputs.sample_lens.tolist() == [6, 1, 5]


def test_uploaded_arrays_are_equal_and_aligned() -> None:
    host = lay_out(mixed_plan(), table(), 4)
    for array, tensor in zip(host, upload(host, CPU), strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.storage_offset() % 4 == 0  # 16 bytes


def test_padding_leaves_the_tokens_where_they_are_and_adds_sequences_without_any() -> None:
    host = lay_out(mixed_plan(), table(), 4)
    padded = pad(host, 2, PaddedSize(tokens=9, decodes=4, chunks=3))
    assert padded.ids.tolist() == [*host.ids, 0, 0] and padded.slots.tolist() == [*host.slots, -1, -1]
    assert padded.positions.tolist() == [*host.positions, 0, 0]
    assert padded.rows.tolist() == [3, 1, 0, 0, 2, 0, 0] and padded.kv_lens.tolist() == [6, 1, 0, 0, 7, 5, 0]
    assert padded.query_starts[4:].tolist() == [2, 5, 7, 7]
    assert padded.sample_tokens[:3].tolist() == [0, 1, 6] and len(padded.sample_tokens) == 7


def test_uploads_into_a_buffer_land_in_the_same_places_each_time() -> None:
    size, buffer = PaddedSize(tokens=9, decodes=4, chunks=3), torch.zeros(100, dtype=torch.int32)
    static = upload(pad(lay_out(mixed_plan(), table(), 4), 2, size), CPU, buffer)
    other = lay_out(StepPlan(2, (), ints(), ints(), ints(), ints(1), ints(9), ()), table(), 4)
    for array, tensor in zip(pad(other, 1, size), static, strict=True):
        tensor.fill_(-9)
        assert len(array) == len(tensor)
    upload(pad(other, 1, size), CPU, buffer)
    assert static.ids.tolist() == [-2] + [0] * 8 and static.kv_lens.tolist() == [9] + [0] * 6


def test_page_table_takes_writes_on_both_sides() -> None:
    pages = PageTable(3, 4, CPU)
    pages.write(ints(0, 2, 0), ints(1, 3, 1), ints(5, 6, 5))
    assert pages.host.tolist() == [[0, 5, 0, 0], [0] * 4, [0, 0, 0, 6]] == pages.tensor.tolist()
