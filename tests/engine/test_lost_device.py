"""Which errors of a step end the engine, and which only the requests in it."""

from __future__ import annotations

import pytest
import torch

from radixserve.engine.errors import EngineLost
from radixserve.engine.lost_device import noticing_loss

GPU = torch.device("cuda")


def broken(device: torch.device) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_answers_no_more_is_lost() -> None:
    with pytest.raises(EngineLost, match="context is lost: device-side assert$"), noticing_loss(GPU, broken):
        raise RuntimeError("device-side assert\nCompile with TORCH_USE_CUDA_DSA")


def test_an_error_that_passes_stays_what_it_is() -> None:
    with pytest.raises(torch.OutOfMemoryError), noticing_loss(GPU, lambda device: None):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_cpu_cannot_be_lost() -> None:
    with pytest.raises(ZeroDivisionError), noticing_loss(torch.device("cpu"), broken):
        raise ZeroDivisionError
