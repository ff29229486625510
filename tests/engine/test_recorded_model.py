"""A recorded step stands in for a model's code only where it computes the same."""

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.recorded_model import RecordedModel
from radixserve.kernels.interface import AttentionShape, BatchLayout, HeadPlaces, Norm, Ops
from radixserve.kernels.native_ops import NativeAttention, NativeOps
from radixserve.kernels.packing import WeightKind, pack
from radixserve.kernels.select import BackendUnavailable, select_native

HIDDEN, VOCAB, HEADS, DIM, PAGE_SIZE = 64, 48, 4, 32, 4


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    try:
        return select_native(1, print)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


def packed(rows: int, cols: int) -> Tensor:
    return pack(WeightKind.Q8, torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)))


class OneLayer:
    """A decoder layer that counts how often its code runs; ``doubles``: computes one thing with torch itself;
    ``again``: reads what attention and the gates have given twice."""

    def __init__(self, doubles: str | None = None, again: bool = False):
        self.doubles, self.again = doubles, again
        self.calls = 0
        self.norm = Norm(torch.ones(HIDDEN), 1e-5)
        self.embedding, self.qkv = packed(VOCAB, HIDDEN), packed(3 * HEADS * DIM, HIDDEN)
        self.out, self.gate_up, self.down = packed(HIDDEN, HEADS * DIM), packed(192, HIDDEN), packed(HIDDEN, 96)
        angles = torch.outer(torch.arange(32.0), torch.rand(DIM // 2, generator=torch.Generator().manual_seed(0)))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1)

    def __call__(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        self.calls += 1
        stream = ctx.ops.embed(ids, self.embedding, HIDDEN)
        if self.doubles is not None:
            stream = stream * 2 if self.doubles == "new" else stream.mul_(2)
        stream, qkv = ctx.ops.project(stream, None, self.norm, self.qkv, None, gated=False)
        caches = ctx.k_caches[0], ctx.v_caches[0]
        q = ctx.ops.rope_store(qkv, HeadPlaces(ctx.positions, self.cos_sin, ctx.slots, *caches))
        attended = ctx.attention.run(q, *caches).flatten(1)
        stream, _ = ctx.ops.add_linear(stream, attended, self.out)
        _, inner = ctx.ops.project(stream, None, self.norm, self.gate_up, None, gated=True)
        stream, _ = ctx.ops.add_linear(stream, inner, self.down)
        if self.again:
            stream, _ = ctx.ops.add_linear(stream, attended, self.out)
            stream, _ = ctx.ops.add_linear(stream, inner, self.down)
        return ctx.ops.rms_norm(stream, self.norm)

    def logits(self, hidden: Tensor, ops: Ops, out: Tensor | None = None) -> Tensor:
        return ops.logits(hidden, self.embedding, out)


def step(
    model: OneLayer | RecordedModel, cache: torch.dtype, ops: NativeOps, attention: NativeAttention, num_tokens: int
) -> Tensor:
    """Logits of ``num_tokens`` tokens, the first of a sequence of its own, the others a prompt."""
    caches = tuple(torch.zeros(8, PAGE_SIZE, HEADS, DIM, dtype=cache) for _ in range(2))
    lengths = [1, num_tokens - 1] if num_tokens > 1 else [1]
    table = [[3], [1, 4, 0, 2, 5, 7]]
    rows = [range(len(lengths)), lengths, np.cumsum([0, *lengths]), [row[:1] * (6 - len(row)) + row for row in table]]
    arrays = [np.array(a, np.int32) for a in rows]
    attention.plan(BatchLayout(1, PAGE_SIZE, *(torch.from_numpy(a) for a in arrays), *arrays))
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    pages = torch.tensor([table[row][at // PAGE_SIZE] for row, length in enumerate(lengths) for at in range(length)])
    slots = pages.long() * PAGE_SIZE + positions % PAGE_SIZE
    context = ForwardContext(ops, attention, positions, slots, caches[:1], caches[1:])
    ids = torch.arange(num_tokens) * 5 % VOCAB
    return model.logits(model(ids, context), ops)


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("doubles", "again", "calls"), [(None, False, 3), (None, True, 3), ("new", False, 5), ("in place", False, 5)]
)
def test_replays_what_the_model_computes(
    doubles: str | None, again: bool, calls: int, cache: torch.dtype, ops: NativeOps
) -> None:
    """Its code runs for the first step, for the record, and for a step with more tokens than the record's; and always
    where the record would leave something out."""
    attention = NativeAttention(AttentionShape(HEADS, HEADS, DIM, PAGE_SIZE, cache), ops)
    model, plain = OneLayer(doubles, again), OneLayer(doubles, again)
    recorded = RecordedModel(model, ops, attention, capacity=20)
    for num_tokens in (7, 20, 1, 25):
        replayed, computed = (step(each, cache, ops, attention, num_tokens) for each in (recorded, plain))
        torch.testing.assert_close(replayed, computed)
    assert model.calls == calls
