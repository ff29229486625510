"""Attention and stores with keys and values in e4m3: as over what the cache holds, with nothing else rounded.

The Triton kernels run on a GPU or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_fp8_cache.py``. Torch's run anywhere.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.kernels.interface import AttentionShape, BatchLayout, HeadPlaces, Norm
from radixserve.kernels.quantized import FP8
from radixserve.kernels.torch_attention import TorchAttention
from radixserve.kernels.torch_ops import TorchOps

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter has no bf16 products
TOLERANCE = 1e-2 if DEVICE.type == "cuda" else 1e-3  # the kernels work with 16 bits, on a CPU too
triton_test = pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("default")
PAGE = 16


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.float() - reference.float()).norm() / reference.float().norm())


def layout_of(kv_lens: list[int], queries: list[int]) -> BatchLayout:
    columns = -(-max(kv_lens) // PAGE)
    table = np.random.default_rng(0).permutation(len(kv_lens) * columns).astype(np.int32).reshape(-1, columns)
    rows, starts = np.arange(len(kv_lens), dtype=np.int32), np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    arrays = rows, np.array(kv_lens, np.int32), starts, table
    on_device = (torch.from_numpy(array).to(DEVICE) for array in arrays)
    return BatchLayout(sum(count == 1 for count in queries), PAGE, *on_device, *arrays)


def narrow_cache(layout: BatchLayout, kv_heads: int, dim: int) -> Tensor:
    """e4m3 [pages, PAGE, kv_heads, dim]."""
    return (randn(layout.page_table.numel(), PAGE, kv_heads, dim) * 20).to(FP8)


def expected(layout: BatchLayout, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """By torch, over the same numbers in the type of q."""
    shape = AttentionShape(q.shape[1], k.shape[2], q.shape[2], PAGE, q.dtype, 0.01, windows=(window,))
    attention = TorchAttention(shape, DEVICE)
    attention.plan(layout)
    return attention.run(q, k.to(q.dtype), v.to(q.dtype), window)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_torch_attends_over_what_the_cache_holds(softcap: float | None) -> None:
    layout = layout_of([70, 5, 300, 40], [1, 1, 1, 33])
    k, v = narrow_cache(layout, 2, 16), narrow_cache(layout, 2, 16)
    q = randn(36, 4, 16)
    wide, narrow = (
        TorchAttention(AttentionShape(4, 2, 16, PAGE, DTYPE, 0.01, softcap, cache_dtype=cached), DEVICE)
        for cached in (None, FP8)
    )
    for attention in (wide, narrow):
        attention.plan(layout)
    assert torch.equal(narrow.run(q, k, v), wide.run(q, k.to(DTYPE), v.to(DTYPE)))


def test_torch_stores_rounded_keys_and_values_and_skips_padding() -> None:
    k_cache, v_cache = (torch.zeros(4, PAGE, 2, 16, device=DEVICE).to(FP8) for _ in range(2))
    wide_k, wide_v = (torch.zeros(4, PAGE, 2, 16, device=DEVICE, dtype=DTYPE) for _ in range(2))
    qkv, positions = randn(5, 8 * 16), torch.arange(5, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([7, -1, 63, 20, -1], device=DEVICE)
    angles = torch.rand(8, 8, device=DEVICE)
    rotation = torch.cat((angles.cos(), angles.sin()), -1)
    for caches in ((k_cache, v_cache), (wide_k, wide_v)):
        TorchOps().rope_store(qkv, HeadPlaces(positions, rotation, slots, *caches))
    assert torch.equal(k_cache.float(), wide_k.to(FP8).float()) and torch.equal(v_cache.float(), wide_v.to(FP8).float())
    assert k_cache.float().abs().sum((2, 3)).count_nonzero() == 3


# ---- Triton ----


@triton_test
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(8, 2, 64), (4, 1, 128)])
@pytest.mark.parametrize("window", [None, 40])
def test_triton_decodes(
    q_heads: int, kv_heads: int, dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=6)
        )
    triton_attention = pytest.importorskip("radixserve.kernels.triton_attention")
    layout = layout_of([70, 5, 230], [1, 1, 1])
    k, v, q = narrow_cache(layout, kv_heads, dim), narrow_cache(layout, kv_heads, dim), randn(3, q_heads, dim)
    shape = AttentionShape(q_heads, kv_heads, dim, PAGE, DTYPE, 0.01, windows=(window,), cache_dtype=FP8)
    kernel = triton_attention.TritonDecodeAttention(shape, 3, DEVICE, pdl=not INTERPRETED)
    kernel.plan_decode(layout, 3)
    out = torch.empty_like(q)
    kernel.run_decode(q, k, v, out, window)
    assert error(out, expected(layout, q, k, v, window)) < TOLERANCE


@triton_test
@pytest.mark.parametrize("window", [None, 40])
def test_triton_chunks(window: int | None) -> None:
    triton_extend = pytest.importorskip("radixserve.kernels.triton_extend")
    layout = layout_of([70, 5, 150], [20, 5, 33])
    k, v, q = narrow_cache(layout, 2, 64), narrow_cache(layout, 2, 64), randn(58, 8, 64)
    out = torch.empty_like(q)
    kernel = triton_extend.TritonExtendAttention(AttentionShape(8, 2, 64, PAGE, DTYPE, 0.01), pdl=not INTERPRETED)
    kernel.run(layout, q, k, v, out, window)
    assert error(out, expected(layout, q, k, v, window)) < TOLERANCE


@triton_test
@pytest.mark.parametrize("with_norms", [False, True])
def test_triton_stores(with_norms: bool) -> None:
    triton_ops = pytest.importorskip("radixserve.kernels.triton_ops")
    q_heads, kv_heads, dim = 4, 2, 64
    qkv, positions = randn(9, 8 * dim), torch.arange(9, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, 17, -1, 30, 31, 32, 5, 63, 0], device=DEVICE)
    angles = torch.rand(16, dim // 2, device=DEVICE)
    rotation = torch.cat((angles.cos(), angles.sin()), -1)
    norms = [Norm(randn(dim), 1e-6), Norm(randn(dim), 1e-6)] if with_norms else []
    ours, theirs = ([torch.zeros(4, PAGE, kv_heads, dim, device=DEVICE).to(FP8) for _ in range(2)] for _ in range(2))
    q = triton_ops.rope_store(qkv, HeadPlaces(positions, rotation, slots, *ours, *norms), pdl=not INTERPRETED)
    reference = TorchOps().rope_store(qkv, HeadPlaces(positions, rotation, slots, *theirs, *norms))
    assert q.shape == (9, q_heads, dim) and error(q, reference) < TOLERANCE
    for our, their in zip(ours, theirs, strict=True):
        # Where the last bit of a wide number differs, the narrow one may be the next.
        assert (our.float() != their.float()).float().mean() < 0.01
        # The interpreter makes 64 of what should be rounded up to 128, and so with other powers of two.
        assert INTERPRETED or error(our, their) < 0.02
