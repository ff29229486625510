"""Logits equal transformers' for every kind of step: whole and chunked prefill, decodes, and mixtures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.configs.schema import ServeConfig
from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.load_model import load_model
from radixserve.engine.model_config import load_spec
from radixserve.engine.model_files import resolve_model
from radixserve.engine.parallel import Collectives, ParallelLogits, ParallelOps
from radixserve.engine.rope_spec import LongRopeScaling
from radixserve.engine.sharding import Shard, local_spec
from radixserve.kernels.interface import AttentionShape, BatchLayout, Ops
from radixserve.kernels.torch_attention import TorchAttention
from radixserve.kernels.torch_ops import TorchOps
from radixserve.tests.engine import tiny_models

CPU = torch.device("cpu")
MAX_LEN = 256
ALONE = Shard()
Piece = tuple[int, list[int], int]  # row, token ids, start


class Paged:
    """A model, or the part of a rank that is tied to the others by ``ranks``, with its own small paged cache; pages are
    dealt out in no order."""

    def __init__(
        self, path: Path, page_size: int = 4, shard: Shard = ALONE, ranks: Collectives | None = None, **options: Any
    ):
        files = resolve_model(str(path))
        whole = load_spec(files)
        config = ServeConfig.model_validate(options)
        self.model = load_model(
            config, files, whole, torch.float32, CPU, MAX_LEN, None, lambda detail, share: None, shard
        )
        spec = local_spec(whole, shard.size)
        self.ops: Ops = ParallelOps(TorchOps(), shard, ranks) if ranks else TorchOps()
        self.gather = ParallelLogits(shard, ranks, whole.vocab_size).gather if ranks else lambda logits: logits
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size, torch.float32)
        shape = AttentionShape(*sizes, spec.attention_scale, spec.attention_softcap, spec.windows)
        self.attention = TorchAttention(shape, CPU)
        self.page_size = page_size
        rows, cols = 4, MAX_LEN // page_size
        self.table = np.random.default_rng(0).permutation(rows * cols).reshape(rows, cols).astype(np.int32)
        size = (spec.num_layers, rows * cols, page_size, spec.num_kv_heads, spec.head_dim)
        # What was never written must never be read.
        self.k, self.v = (torch.full(size, torch.nan).unbind(0) for _ in range(2))

    @torch.inference_mode()
    def logits(self, decodes: list[Piece], chunks: list[Piece]) -> list[Tensor]:
        """One step; the logits of every token of each piece."""
        pieces = decodes + chunks
        rows = np.array([row for row, _, _ in pieces], np.int32)
        lens = np.array([len(ids) for _, ids, _ in pieces], np.int32)
        kv_lens = np.array([start + len(ids) for _, ids, start in pieces], np.int32)
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        positions = np.concatenate([np.arange(start, start + len(ids)) for _, ids, start in pieces]).astype(np.int32)
        pages = self.table[np.repeat(rows, lens), positions // self.page_size].astype(np.int64)
        slots = torch.from_numpy(pages * self.page_size + positions % self.page_size)
        tensors = [torch.from_numpy(array) for array in (rows, kv_lens, starts, self.table)]
        layout = BatchLayout(len(decodes), self.page_size, *tensors, rows, kv_lens, starts, self.table)
        self.attention.plan(layout)
        context = ForwardContext(self.ops, self.attention, torch.from_numpy(positions), slots, self.k, self.v)
        hidden = self.model(torch.tensor([i for _, ids, _ in pieces for i in ids]), context)
        return list(self.gather(self.model.logits(hidden, self.ops)).split(lens.tolist()))


def check(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_logits_of_every_kind_of_step(variant: str, tmp_path: Path) -> None:
    oracle = tiny_models.make(variant)
    model = Paged(tiny_models.save(oracle, tmp_path, max_shard_size="80KB"))
    long, short, other = (tiny_models.random_ids(n, seed=n) for n in (150, 9, 70))
    expected = {row: tiny_models.logits(oracle, ids) for row, ids in enumerate((long, short, other))}

    check(model.logits([], [(1, short[:7], 0)])[0], expected[1][:7])
    first, second = model.logits([], [(0, long[:80], 0), (2, other[:33], 0)])
    check(first, expected[0][:80])
    check(second, expected[2][:33])
    decoded, continued = model.logits([(1, short[7:8], 7)], [(0, long[80:148], 80)])
    check(decoded, expected[1][7:8])
    check(continued, expected[0][80:148])
    pieces = model.logits([(0, long[148:149], 148), (1, short[8:9], 8)], [(2, other[33:34], 33)])
    for logits, (row, at) in zip(pieces, [(0, 148), (1, 8), (2, 33)], strict=True):
        check(logits, expected[row][at : at + 1])
    check(model.logits([], [(2, other[34:], 34)])[0], expected[2][34:])


@pytest.mark.parametrize(("variant", "original"), [("phi3-long", 8), ("phi3-short", 300)])
def test_longrope_is_tried_on_both_sides_of_the_original_context(variant: str, original: int, tmp_path: Path) -> None:
    """Where the configuration gave it a second time, with a default, both were on the same side."""
    rope = load_spec(resolve_model(str(tiny_models.save(tiny_models.make(variant), tmp_path)))).layers[0].rope
    assert rope is not None and isinstance(rope.scaling, LongRopeScaling)
    assert rope.scaling.original_max_position == original


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_size_does_not_change_a_bit(page_size: int, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.make("llama"), tmp_path)
    ids = tiny_models.random_ids(70, seed=1)
    results = []
    for size in (4, page_size):
        model = Paged(folder, size)
        model.logits([], [(0, ids[:40], 0), (1, ids[:65], 0)])
        results.append(model.logits([(0, ids[40:41], 40), (1, ids[65:66], 65)], [(2, ids, 0)]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_attention_of_a_decode_does_not_depend_on_its_batch() -> None:
    """Lengths on both sides of where decodes begin to share a call."""
    shape = AttentionShape(6, 2, 16, 8, torch.float32)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(96, 8, 2, 16, generator=generator) for _ in range(2))
    q = torch.randn(4, 6, 16, generator=generator)
    table = np.random.default_rng(1).permutation(96).reshape(4, 24).astype(np.int32)

    def attend(rows: list[int], lens: list[int]) -> Tensor:
        arrays = [np.array(rows, np.int32), np.array(lens, np.int32), np.arange(len(rows) + 1, dtype=np.int32), table]
        attention = TorchAttention(shape, CPU)
        attention.plan(BatchLayout(len(rows), 8, *(torch.from_numpy(array) for array in arrays), *arrays))
        return attention.run(q[rows], k, v)

    lens = [5, 100, 190, 101]
    together = attend([0, 1, 2, 3], lens)
    for row in range(4):
        assert torch.equal(attend([row], lens[row : row + 1])[0], together[row])
