"""Not a bit of a token's results depends on what is computed beside it, nor on where chunks begin.

The Triton kernels run on a GPU or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_cuda_invariant.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.kernels.interface import AttentionKernel, AttentionShape, BatchLayout, Norm
from radixserve.kernels.torch_attention import TorchAttention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter has no bf16 products
TOLERANCE = 1e-5 if INTERPRETED else 1e-2
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    pytest.importorskip("triton")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.float() - reference.float()).norm() / reference.float().norm())


@pytest.mark.parametrize("mode", ["plain", "bias", "residual", "gated", "logits"])
@pytest.mark.parametrize(("n", "k"), [(96, 192), (50, 384), (40, 100), (200, 1024)])
def test_a_row_of_a_product_is_the_same_in_every_batch(mode: str, n: int, k: int) -> None:
    from radixserve.kernels.cuda_invariant import InvariantCudaOps

    ops = InvariantCudaOps(pdl=not INTERPRETED)
    rows, gated = 150, mode == "gated"
    x, weight = randn(rows, k), randn(n * (1 + gated), k)
    residual, bias, norm = randn(rows, n), randn(n), Norm(torch.ones(k, device=DEVICE).to(DTYPE), 1e-6)

    def product(chosen: Sequence[int]) -> Tensor:
        some = x[list(chosen)]
        match mode:
            case "gated":
                return ops.project(some, None, norm, weight, None, gated=True)[1]
            case "residual":
                return ops.add_linear(residual[list(chosen)], some, weight)[0]
            case "logits":
                return ops.logits(some, weight)
        return ops.linear(some, weight, bias if mode == "bias" else None)

    whole = product(range(rows))
    expected = x.float() @ weight.float().t()
    if gated:
        normed = F.rms_norm(x.float(), (k,)) @ weight.float().t()
        expected = F.silu(normed[:, :n]) * normed[:, n:]
    expected = expected + {"bias": bias, "residual": residual}.get(mode, torch.zeros_like(bias)).float()
    assert error(whole, expected) < 2 * TOLERANCE
    for chosen in ([0], [149], range(3, 70), range(40, 90), range(149, -1, -1), [7] * 65):
        assert torch.equal(product(chosen), whole[list(chosen)]), chosen


def test_a_token_gets_the_same_from_its_experts_in_every_batch() -> None:
    """Its weights, its products, and the sum of them that the next norm takes."""
    from radixserve.kernels.cuda_invariant import InvariantCudaOps

    ops = InvariantCudaOps(pdl=not INTERPRETED)
    tokens, count, hidden, inner = 40, 6, 64, 48
    x, router = randn(tokens, hidden), randn(count, hidden) / hidden**0.5
    gate_up, down = randn(count, 2 * inner, hidden) / hidden**0.5, randn(count, hidden, inner) / inner**0.5
    norm, slots = Norm(torch.ones(hidden, device=DEVICE).to(DTYPE), 1e-6), torch.arange(tokens, device=DEVICE)

    def stream(chosen: Sequence[int]) -> Tensor:
        some = x[list(chosen)]
        answer = ops.experts(some, router, gate_up, down, 2, True, slots[: len(some)])
        return ops.add_rms_norm(answer, some.clone(), norm)[1]

    whole = stream(range(tokens))
    for chosen in ([0], [39], range(3, 20), range(39, -1, -1), [7] * 35):
        assert torch.equal(stream(chosen), whole[list(chosen)]), chosen


class Text:
    """One sequence whose keys and values are all stored, in shuffled pages, and kernels over it."""

    def __init__(self, kernel: AttentionKernel, shape: AttentionShape, length: int, window: int | None):
        columns = -(-length // shape.page_size)
        self.table = torch.randperm(2 * columns).int().reshape(2, columns).to(DEVICE)
        cache = (2 * columns, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.caches = randn(*cache), randn(*cache)
        self.q = randn(length, shape.num_heads, shape.head_dim)
        self._kernel, self._page_size, self._window = kernel, shape.page_size, window

    def attend(
        self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]] = (), kernel: AttentionKernel | None = None
    ) -> Tensor:
        """Of a step with queries at the positions ``decodes`` and those of the ``chunks`` from .. to, in that order."""
        pieces = [(position, position + 1) for position in decodes] + list(chunks)
        ends = np.array([end for _, end in pieces], np.int32)
        counts = ends - np.array([start for start, _ in pieces], np.int32)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        rows = np.ones(len(pieces), np.int32)
        arrays = [torch.from_numpy(array).to(DEVICE) for array in (rows, ends, starts)]
        host = (rows, ends, starts, self.table.cpu().numpy())
        kernel = kernel or self._kernel
        kernel.plan(BatchLayout(len(decodes), self._page_size, *arrays, self.table, *host))
        queries = torch.cat([self.q[start:end] for start, end in pieces])
        return kernel.run(queries, *self.caches, self._window)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 3.0)])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim", "page_size"), [(4, 2, 64, 16), (3, 1, 128, 1), (2, 2, 96, 4)])
def test_a_query_is_answered_the_same_decoded_in_any_chunk_and_in_any_batch(
    q_heads: int, kv_heads: int, dim: int, page_size: int, window: int | None, softcap: float | None
) -> None:
    from radixserve.kernels.cuda_invariant import InvariantCudaAttention

    shape = AttentionShape(q_heads, kv_heads, dim, page_size, DTYPE, None, softcap, (window,))
    kernel = InvariantCudaAttention(shape, 40, DEVICE, pdl=not INTERPRETED)
    length = 150
    text = Text(kernel, shape, length, window)
    whole = text.attend([], [(0, length)])
    assert error(whole, text.attend([], [(0, length)], TorchAttention(shape, DEVICE))) < TOLERANCE
    for cut in (1, 63, 100, 149):
        assert torch.equal(text.attend([], [(cut, length), (0, cut)]), torch.cat((whole[cut:], whole[:cut])))
    for decodes in ([149], [0, 63, 64, 5, 128], list(range(100, 140))):
        assert torch.equal(text.attend(decodes), whole[decodes]), "decoded"
    mixed = text.attend([148, 3], [(70, 140), (10, 12)])
    assert torch.equal(mixed, torch.cat((whole[[148, 3]], whole[70:140], whole[10:12])))


def test_padded_steps_planned_on_the_device_change_nothing() -> None:
    """As a CUDA graph holds them: decodes without keys behind the real ones, and tokens of nobody at the end."""
    from radixserve.engine.step_inputs import PaddedSize, StepInputs, pad
    from radixserve.kernels.cuda_invariant import InvariantCudaAttention

    shape = AttentionShape(4, 2, 64, 16, DTYPE)
    kernel = InvariantCudaAttention(shape, 8, DEVICE, pdl=not INTERPRETED)
    text = Text(kernel, shape, 90, None)
    expected = text.attend([50, 20], [(60, 90)])
    nothing = np.zeros(0, np.int32)
    sequences = [np.array(values, np.int32) for values in ((1, 1, 1), (51, 21, 90), (0, 1, 2, 32))]
    padded = pad(StepInputs(*[nothing] * 3, *sequences, *[nothing] * 4), 2, PaddedSize(40, 5, 3))
    arrays = [torch.from_numpy(array).to(DEVICE) for array in (padded.rows, padded.kv_lens, padded.query_starts)]
    kernel.plan(BatchLayout(5, 16, *arrays, text.table, *[nothing] * 3, text.table.cpu().numpy()))
    queries = torch.cat((text.q[[50, 20]], text.q[60:90], randn(8, 4, 64)))
    assert torch.equal(kernel.run(queries, *text.caches)[:32], expected)
