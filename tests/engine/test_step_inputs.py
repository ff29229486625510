"""The flat arrays of a step, and how they get to the device."""

from __future__ import annotations

import numpy as np
import torch

from radixserve.engine.page_table import PageTable
from radixserve.engine.step import PrefillChunk, StepPlan
from radixserve.engine.step_inputs import lay_out, upload

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
    assert inputs.chunk_ids.tolist() == [7, 8, 9, 5, 6]
    assert inputs.sample_tokens.tolist() == [0, 1, 6]
    assert inputs.sample_rows.tolist() == [3, 1, 0] and inputs.sample_lens.tolist() == [6, 1, 5]


def test_uploaded_arrays_are_equal_and_aligned() -> None:
    host = lay_out(mixed_plan(), table(), 4)
    for array, tensor in zip(host, upload(host, CPU), strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.storage_offset() % 4 == 0  # 16 bytes


def test_page_table_takes_writes_on_both_sides() -> None:
    pages = PageTable(3, 4, CPU)
    pages.write(ints(0, 2, 0), ints(1, 3, 1), ints(5, 6, 5))
    assert pages.host.tolist() == [[0, 5, 0, 0], [0] * 4, [0, 0, 0, 6]] == pages.tensor.tolist()
