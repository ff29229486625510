"""Heads of a number of values that is no power of two are attended to as in torch: decodes and chunks, whole and cut.

On a GPU or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_head_sizes.py``.
"""

from __future__ import annotations

import os
import types

import numpy as np
import pytest
import torch

from radixserve.kernels.interface import AttentionShape, BatchLayout
from radixserve.kernels.torch_attention import TorchAttention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter has no bf16 products
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    pytest.importorskip("triton")

PAGE_SIZE = 8
LENGTHS, QUERIES = [200, 1, 33, 70, 20], [1, 1, 1, 40, 20]  # three decodes, two chunks


def layout() -> BatchLayout:
    pages = -(-max(LENGTHS) // PAGE_SIZE)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(pages * len(LENGTHS), generator=generator).int().view(len(LENGTHS), pages).numpy()
    starts = np.concatenate(([0], np.cumsum(QUERIES))).astype(np.int32)
    arrays = (np.arange(len(LENGTHS), dtype=np.int32), np.array(LENGTHS, np.int32), starts, table)
    return BatchLayout(3, PAGE_SIZE, *(torch.from_numpy(array).to(DEVICE) for array in arrays), *arrays)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, 3.0)])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(2, 2, 96), (3, 1, 80)])
def test_decodes_and_chunks_equal_torch(
    q_heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from radixserve.kernels.split_attention import SplitAttention
    from radixserve.kernels.triton_attention import TritonDecodeAttention
    from radixserve.kernels.triton_extend import TritonExtendAttention

    if INTERPRETED:
        few = types.SimpleNamespace(multi_processor_count=4)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    shape = AttentionShape(q_heads, kv_heads, dim, PAGE_SIZE, DTYPE, None, softcap, (window,))
    step = layout()
    caches = [torch.randn(step.page_table.numel(), PAGE_SIZE, kv_heads, dim, device=DEVICE).to(DTYPE) for _ in range(2)]
    q = torch.randn(sum(QUERIES), q_heads, dim, device=DEVICE).to(DTYPE)
    decodes = TritonDecodeAttention(shape, 4, DEVICE, pdl=not INTERPRETED)
    oracle = TorchAttention(shape, DEVICE)
    found = []
    for kernel in (SplitAttention(decodes, None, TritonExtendAttention(shape, pdl=not INTERPRETED)), oracle):
        kernel.plan(step)
        found.append(kernel.run(q, *caches, window).float())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < (1e-5 if INTERPRETED else 1e-2)
