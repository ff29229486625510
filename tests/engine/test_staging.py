"""Weights on their way to a GPU through pinned memory."""

import pytest
import torch
from torch import Tensor

from radixserve.engine.staging import PinnedCopier

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def stored(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (stored((9000, 4096), BF16), BF16),  # many pieces, the last of which is not full
        (stored((9000, 4096), torch.float32), BF16),
        (stored((9000, 4096), FP8), FP8),
        (stored((5000, 4096), BF16)[7:4007, 1024:2048], BF16),  # a rank's part
        (stored((8,), torch.float32), BF16),
        (stored((2, 1 << 23), BF16), BF16),  # rows that are longer than a piece
    ],
)
def test_what_arrives_is_what_was_stored(values: Tensor, dtype: torch.dtype) -> None:
    place = torch.zeros(values.shape, dtype=dtype, device="cuda")
    PinnedCopier().copy(place, values)
    assert torch.equal(place.cpu().float(), values.to(dtype).float())


@pytest.mark.gpu
def test_halves_of_merged_matrices_of_experts_arrive_beside_each_other() -> None:
    gate, up = (torch.randn(4, 1024, 1024) for _ in range(2))
    merged = torch.zeros(4, 2048, 1024, device="cuda")
    copier = PinnedCopier()
    for place, values in zip(merged.chunk(2, dim=1), (gate, up), strict=True):
        copier.copy(place, values)
    assert torch.equal(merged.cpu(), torch.cat((gate, up), dim=1))
