"""Which kernels are refused for what."""

import pytest
import torch

from radixserve.kernels.interface import AttentionShape
from radixserve.kernels.quantized import FP8
from radixserve.kernels.select import BackendUnavailable, select_attention


@pytest.mark.parametrize("cached", [None, torch.bfloat16])
def test_flashinfer_reads_a_cache_of_the_activations_type(cached: torch.dtype | None) -> None:
    """All that is missing here is a GPU."""
    shape = AttentionShape(8, 2, 64, 16, torch.bfloat16, cache_dtype=cached)
    with pytest.raises(BackendUnavailable, match="needs a CUDA device"):
        select_attention("flashinfer", shape, torch.device("cpu"), 8)


def test_flashinfer_is_refused_for_a_narrower_cache() -> None:
    shape = AttentionShape(8, 2, 64, 16, torch.bfloat16, cache_dtype=FP8)
    with pytest.raises(BackendUnavailable, match="kv_cache_dtype fp8 does not go with .* --attention-backend auto"):
        select_attention("flashinfer", shape, torch.device("cpu"), 8)
