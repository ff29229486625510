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


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_each_query_sees_its_window_with_capped_scores(
    softcap: float | None, scale: float | None, make_kernel: Callable[[AttentionShape], AttentionKernel]
) -> None:
    generator = torch.Generator().manual_seed(3)
    kv_lens = np.array([length for length, _ in PIECES], np.int32)
    starts = np.concatenate(([0], np.cumsum([queries for _, queries in PIECES]))).astype(np.int32)
    rows, columns = len(PIECES), 300 // PAGE_SIZE
    table = np.random.default_rng(0).permutation(rows * columns).reshape(rows, columns).astype(np.int32)
    k_cache, v_cache = (torch.randn(table.size, PAGE_SIZE, KV_HEADS, DIM, generator=generator) for _ in range(2))
    q = torch.randn(int(starts[-1]), Q_HEADS, DIM, generator=generator)
    windows = (None, 1, 20, 50, 299)
    kernel = make_kernel(AttentionShape(Q_HEADS, KV_HEADS, DIM, PAGE_SIZE, q.dtype, scale, softcap, windows))
    arrays = (np.arange(rows, dtype=np.int32), kv_lens, starts, table)
    kernel.plan(BatchLayout(3, PAGE_SIZE, *(torch.from_numpy(array) for array in arrays), *arrays))

    for window in windows:
        attended = kernel.run(q, k_cache, v_cache, window)
        for row, (length, _) in enumerate(PIECES):
            k, v = (cache[table[row].tolist()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            first, last = starts[row : row + 2].tolist()
            expected = plainly(q[first:last], k, v, scale or DIM**-0.5, softcap, window)
            torch.testing.assert_close(attended[first:last], expected, msg=f"window {window}, piece {row}")
