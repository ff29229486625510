"""Windows, caps and scales of attention against a formula written out plainly."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.kernels.interface import AttentionKernel, AttentionShape, BatchLayout
from radixserve.kernels.native_ops import NativeAttention, NativeOps
from radixserve.kernels.select import BackendUnavailable, select_native
from radixserve.kernels.torch_attention import TorchAttention

CPU = torch.device("cpu")
PAGE_SIZE = 4
Q_HEADS, KV_HEADS, DIM = 4, 2, 16
# (KV length, queries): decodes on both sides of where they share a call, then chunks with and without a prefix.
PIECES = [(1, 1), (60, 1), (300, 1), (40, 40), (50, 9)]


def plainly(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, window: int | None) -> Tensor:
    """One sequence; q [Q, heads, D], the last Q positions of k, v [L, kv_heads, D]."""
    out = torch.zeros_like(q)
    for query in range(len(q)):
        last = len(k) - len(q) + query
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(Q_HEADS):
            shared = head // (Q_HEADS // KV_HEADS)
            scores = k[first : last + 1, shared] @ q[query, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[query, head] = scores.softmax(0) @ v[first : last + 1, shared]
    return out


@pytest.fixture(scope="module")
def native_ops() -> NativeOps:
    try:
        return select_native(1, print)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=["torch", "native"])
def make_kernel(request: pytest.FixtureRequest) -> Callable[[AttentionShape], AttentionKernel]:
    if request.param == "torch":
        return lambda shape: TorchAttention(shape, CPU)
    ops = request.getfixturevalue("native_ops")
    return lambda shape: NativeAttention(shape, ops)


def check(
    make_kernel: Callable[[AttentionShape], AttentionKernel],
    shape: AttentionShape,
    pieces: list[tuple[int, int]],
    tolerance: float | None = None,
) -> None:
    """Each of ``pieces`` and each window of ``shape``, in pages that lie about."""
    generator = torch.Generator().manual_seed(3)
    kv_lens = np.array([length for length, _ in pieces], np.int32)
    starts = np.concatenate(([0], np.cumsum([queries for _, queries in pieces]))).astype(np.int32)
    rows, columns = len(pieces), 300 // PAGE_SIZE
    table = np.random.default_rng(0).permutation(rows * columns).reshape(rows, columns).astype(np.int32)
    size = (table.size, PAGE_SIZE, KV_HEADS, shape.head_dim)
    k_cache, v_cache = (torch.randn(size, generator=generator).to(shape.dtype) for _ in range(2))
    q = torch.randn(int(starts[-1]), Q_HEADS, shape.head_dim, generator=generator)
    kernel = make_kernel(shape)
    if isinstance(kernel, NativeAttention):  # takes caches of which the keys and values of a page lie together
        k_cache, v_cache = torch.stack((k_cache, v_cache), 1).unbind(1)
    arrays = (np.arange(rows, dtype=np.int32), kv_lens, starts, table)
    num_decodes = sum(queries == 1 for _, queries in pieces)
    kernel.plan(BatchLayout(num_decodes, PAGE_SIZE, *(torch.from_numpy(array) for array in arrays), *arrays))

    for window in shape.windows:
        attended = kernel.run(q, k_cache, v_cache, window)
        for row, (length, _) in enumerate(pieces):
            k, v = (cache[table[row].tolist()].flatten(0, 1)[:length].float() for cache in (k_cache, v_cache))
            first, last = starts[row : row + 2].tolist()
            expected = plainly(q[first:last], k, v, shape.score_scale, shape.softcap, window)
            torch.testing.assert_close(
                attended[first:last], expected, atol=tolerance, rtol=tolerance, msg=f"window {window}, piece {row}"
            )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_each_query_sees_its_window_with_capped_scores(
    softcap: float | None, scale: float | None, make_kernel: Callable[[AttentionShape], AttentionKernel]
) -> None:
    windows = (None, 1, 20, 50, 299)
    shape = AttentionShape(Q_HEADS, KV_HEADS, DIM, PAGE_SIZE, torch.float32, scale, softcap, windows)
    check(make_kernel, shape, PIECES)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("pieces", [[(60, 1), (70, 70), (300, 50)], [(60, 1), (300, 1), (16, 1), (17, 1)]])
def test_a_cache_in_bf16_costs_little_precision(
    softcap: float | None, head_dim: int, pieces: list[tuple[int, int]], native_ops: NativeOps
) -> None:
    """Also in blocks of queries that a tile unit multiplies: heads of a multiple of 32, several blocks of keys. With
    many decodes one thread has all heads of each."""
    shape = AttentionShape(Q_HEADS, KV_HEADS, head_dim, PAGE_SIZE, torch.bfloat16, None, softcap, (None, 20, 100))
    check(lambda shape: NativeAttention(shape, native_ops), shape, pieces, 0.02)


def test_a_query_gets_the_same_whatever_chunk_it_is_in(native_ops: NativeOps) -> None:
    generator = torch.Generator().manual_seed(5)
    q = 3 * torch.randn(200, Q_HEADS, 64, generator=generator)
    caches = [torch.randn(50, PAGE_SIZE, KV_HEADS, 64, generator=generator).bfloat16() for _ in range(2)]
    kernel = NativeAttention(AttentionShape(Q_HEADS, KV_HEADS, 64, PAGE_SIZE, torch.bfloat16), native_ops)
    attended = []
    for first in (0, 37):
        arrays = [np.array(a, np.int32) for a in ([0], [200], [0, 200 - first], [range(50)])]
        kernel.plan(BatchLayout(0, PAGE_SIZE, *(torch.from_numpy(array) for array in arrays), *arrays))
        attended.append(kernel.run(q[first:].contiguous(), *caches)[37 - first :])
    assert torch.equal(*attended)
