"""Parts of a model that work together give what the whole model gives. The ranks here are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from radixserve.engine.decoder import DecoderLayer
from radixserve.engine.errors import ConfigError, ModelError
from radixserve.engine.kv_scales import scale_kv
from radixserve.engine.layers.experts import SparseMLP
from radixserve.engine.layers.linear import QuantizedLinear
from radixserve.engine.model_config import load_spec
from radixserve.engine.model_files import resolve_model
from radixserve.engine.parallel import ParallelOps
from radixserve.engine.sharding import Shard, local_spec
from radixserve.kernels.interface import Norm, Weight
from radixserve.kernels.quantized import Form, QuantizedMatrix, Stack, quantize
from radixserve.kernels.torch_ops import TorchOps
from radixserve.tests.engine import tiny_models
from radixserve.tests.engine.quantized_checkpoints import (
    BLOCK,
    Writer,
    awq,
    fp8_by_block,
    fp8_by_row,
    gptq_in_another_order,
    save_quantized,
)
from radixserve.tests.engine.test_models import Paged, check
from radixserve.tests.engine.tiny_ggufs import write_gguf


class ThreadRanks:
    """``Collectives`` among ``size`` threads."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size, timeout=30)
        self._given: list[Tensor | None] = [None] * size

    def seat(self, rank: int) -> ThreadSeat:
        return ThreadSeat(rank, self)

    def exchange(self, rank: int, tensor: Tensor) -> Tensor:
        """What all have given, [size, ...]."""
        self._given[rank] = tensor
        self._barrier.wait()
        gathered = torch.stack([given for given in self._given if given is not None])
        self._barrier.wait()
        return gathered


class ThreadSeat:
    def __init__(self, rank: int, ranks: ThreadRanks):
        self._rank = rank
        self._ranks = ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._ranks.exchange(self._rank, tensor).sum(0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._ranks.exchange(self._rank, tensor)


class SummingOps(TorchOps):
    """Whose norms make the sums over ranks, and whose products are left in parts, as on a GPU."""

    def __init__(self, seat: ThreadSeat):
        super().__init__()
        self._seat = seat

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return super().add_rms_norm(self._seat.all_reduce(x if x.dim() == 2 else x.sum(0)), residual, norm)

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        product = self.linear(y, weight, bias)
        return stream, torch.stack((product / 4, product / 4 * 3))


def on_all_ranks(path: Path, size: int, run: Callable[[Paged], list[Tensor]], **options: Any) -> list[Tensor]:
    """What ``run`` gives, which must be the same on every rank."""
    ranks = ThreadRanks(size)
    with ThreadPoolExecutor(size) as threads:
        seats = [Shard(rank, size) for rank in range(size)]
        parts = [Paged(path, shard=shard, ranks=ranks.seat(shard.rank), **options) for shard in seats]
        answers = list(threads.map(run, parts))
    for answer in answers[1:]:
        assert all(torch.equal(*pair) for pair in zip(answers[0], answer, strict=True))
    return answers[0]


IDS, OTHER = tiny_models.random_ids(40, seed=1), tiny_models.random_ids(9, seed=2)


def steps(model: Paged) -> list[Tensor]:
    """A chunk; another one with a whole prompt; a decode with the last chunk."""
    first = model.logits([], [(0, IDS[:20], 0)])
    second = model.logits([], [(1, OTHER[:8], 0), (0, IDS[20:33], 20)])
    third = model.logits([(1, OTHER[8:], 8)], [(0, IDS[33:], 33)])
    return [*first, *second, *third]


def expected_steps(oracle: Any) -> list[Tensor]:
    ids, other = tiny_models.logits(oracle, IDS), tiny_models.logits(oracle, OTHER)
    return [ids[:20], other[:8], ids[20:33], other[8:], ids[33:]]


VARIANTS: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {}),
    ("llama", 4, {"vocab_size": 163}),  # two KV heads, and a vocabulary that cannot be dealt out evenly
    ("llama-wide-heads", 4, {}),  # one KV head
    ("llama-bias", 4, {"tie_word_embeddings": True}),
    ("qwen3-tied", 4, {}),
    ("qwen3moe-mixed", 4, {}),
    ("gemma2", 2, {}),
    ("qwen3moe", 2, {}),
    ("phi3", 4, {}),  # merged matrices in the checkpoint
]


@pytest.mark.parametrize(("variant", "size", "changes"), VARIANTS, ids=[f"{v}-{n}" for v, n, _ in VARIANTS])
def test_logits_of_ranks_equal_those_of_the_whole_model(
    variant: str, size: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    oracle = tiny_models.make(variant, **changes)
    answers = on_all_ranks(tiny_models.save(oracle, tmp_path), size, steps)
    for ours, expected in zip(answers, expected_steps(oracle), strict=True):
        check(ours, expected)


@pytest.mark.parametrize("variant", ["llama-bias", "qwen3moe-mixed", "phi3"])
def test_sums_may_be_left_to_the_norms(variant: str, tmp_path: Path) -> None:
    def left_to_norms(model: Paged) -> list[Tensor]:
        parallel = model.ops
        assert isinstance(parallel, ParallelOps)
        seat = parallel.ranks
        assert isinstance(seat, ThreadSeat)
        model.ops = ParallelOps(SummingOps(seat), parallel.shard, seat, norms_sum=True)
        return steps(model)

    oracle = tiny_models.make(variant)
    answers = on_all_ranks(tiny_models.save(oracle, tmp_path), 2, left_to_norms)
    for ours, expected in zip(answers, expected_steps(oracle), strict=True):
        check(ours, expected)


@pytest.mark.parametrize("variant", ["llama-bias", "qwen3moe"])
def test_a_gguf_file_is_cut_as_well(variant: str, tmp_path: Path) -> None:
    oracle = tiny_models.make(variant, rms_norm_eps=2.0**-18)
    answers = on_all_ranks(write_gguf(oracle, tmp_path / "m.gguf"), 4, steps)
    for ours, expected in zip(answers, expected_steps(oracle), strict=True):
        check(ours, expected)


QUANTIZED: dict[Writer, tuple[str, dict[str, Any], list[int | None]]] = {
    fp8_by_row: ("llama", {"quant_method": "fp8"}, [8, 8, 8]),
    fp8_by_block: ("phi3", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}, [8, None, 8]),  # 32 of 64 columns
    awq: ("qwen2", {"quant_method": "awq", "bits": 4, "version": "gemm"}, [4, 4, 4]),
    gptq_in_another_order: ("llama", {"quant_method": "gptq", "bits": 4}, [4, None, None]),
}


def held(model: Paged) -> list[Any]:
    layer = model.model.model.layers[1]
    assert isinstance(layer, DecoderLayer)
    return [layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.down_proj]


@pytest.mark.parametrize("write", QUANTIZED, ids=lambda write: write.__name__)
def test_quantized_matrices_are_cut_and_dequantized_only_where_columns_rule_it_out(
    write: Writer, tmp_path: Path
) -> None:
    variant, config, bits = QUANTIZED[write]
    oracle = save_quantized(variant, tmp_path, write, config, intermediate_size=128)
    for ours, expected in zip(on_all_ranks(tmp_path, 2, steps), expected_steps(oracle), strict=True):
        check(ours, expected)
    matrices = held(Paged(tmp_path, shard=Shard(1, 2)))
    assert [m.matrix.form.bits if isinstance(m, QuantizedLinear) else None for m in matrices] == bits


# With the experts' width, of which each of two ranks has half.
QUANTIZED_EXPERTS: dict[Writer, tuple[str, dict[str, Any], int, int | None]] = {
    fp8_by_row: ("qwen3moe", {"quant_method": "fp8"}, 64, 8),
    fp8_by_block: ("qwen3moe-mixed", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}, 128, 8),
    awq: ("mixtral", {"quant_method": "awq", "bits": 4, "version": "gemm"}, 128, 4),
    gptq_in_another_order: ("qwen3moe", {"quant_method": "gptq", "bits": 4}, 64, None),
}


def held_experts(model: Paged) -> list[Stack]:
    return list(next(module for module in model.model.modules() if isinstance(module, SparseMLP)).experts.stacks)


@pytest.mark.parametrize("write", QUANTIZED_EXPERTS, ids=lambda write: write.__name__)
def test_quantized_experts_are_cut(write: Writer, tmp_path: Path) -> None:
    variant, config, width, bits = QUANTIZED_EXPERTS[write]
    sizes = {"intermediate_size" if variant == "mixtral" else "moe_intermediate_size": width}
    oracle = save_quantized(variant, tmp_path, write, config, **sizes)
    for ours, expected in zip(on_all_ranks(tmp_path, 2, steps), expected_steps(oracle), strict=True):
        check(ours, expected)
    for stack in held_experts(Paged(tmp_path, shard=Shard(1, 2))):
        assert (stack.form.bits if isinstance(stack, QuantizedMatrix) else None) == bits


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_ranks_round_their_parts_of_experts_to_fp8(load_format: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.make("qwen3moe", moe_intermediate_size=64), tmp_path)
    gate_up, down = held_experts(Paged(folder, load_format=load_format))
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    ours = held_experts(Paged(folder, shard=Shard(1, 2), quantization="fp8", load_format=load_format))
    parts = gate_up[:, [*range(32, 64), *range(96, 128)]], down[:, :, 32:]
    for part, values in zip(ours, parts, strict=True):
        expected = quantize(values.flatten(0, 1), Form(8, None))
        assert isinstance(part, QuantizedMatrix)
        assert torch.equal(part.values.float(), expected.values.float())
        assert torch.equal(part.scales, expected.scales)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_ranks_round_their_parts_to_fp8(load_format: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.make("llama"), tmp_path)
    qkv, output, down = (part.weight for part in held(Paged(folder, load_format=load_format)))
    ours = held(Paged(folder, shard=Shard(1, 2), quantization="fp8", load_format=load_format))
    rows = [*range(32, 64), *range(80, 96), *range(112, 128)]  # two of four heads, one of two for keys and values
    for part, values in zip(ours, (qkv[rows], output[:, 32:], down[:, 48:]), strict=True):
        expected = quantize(values, Form(8, None))
        assert torch.equal(part.matrix.values.float(), expected.values.float())
        assert torch.equal(part.matrix.scales, expected.scales)


def test_each_rank_has_its_own_factors_for_a_narrow_cache(tmp_path: Path) -> None:
    def scaled_steps(model: Paged) -> list[Tensor]:
        scale_kv(model.model)
        return steps(model)

    oracle = tiny_models.make("llama-bias")
    answers = on_all_ranks(tiny_models.save(oracle, tmp_path), 4, scaled_steps)
    for ours, expected in zip(answers, expected_steps(oracle), strict=True):
        check(ours, expected)


def test_random_weights_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.make("qwen3moe-mixed", vocab_size=163), tmp_path)
    for ours, expected in zip(
        on_all_ranks(folder, 4, steps, load_format="dummy"), steps(Paged(folder, load_format="dummy")), strict=True
    ):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_weights_that_do_not_fit_are_told_in_the_sizes_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.make("llama"), tmp_path)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 96', '"intermediate_size": 64'))
    with pytest.raises(ModelError, match=r"mlp.gate_proj.weight is \[96, 64\], not \[64, 64\]"):
        Paged(folder, shard=Shard(0, 2))


@pytest.mark.parametrize(
    ("variant", "changes", "size", "words"),
    [
        ("llama", {}, 8, "8 does not divide the model's number of attention heads of 4; use --tensor-parallel-size 4"),
        ("llama", {"intermediate_size": 90}, 4, "feed-forward width of 90; use --tensor-parallel-size 2"),
        ("qwen3moe", {"moe_intermediate_size": 30}, 4, "experts' width of 30; use --tensor-parallel-size 2"),
        (
            "llama",
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            "3 KV heads do not divide",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    variant: str, changes: dict[str, Any], size: int, words: str, tmp_path: Path
) -> None:
    spec = load_spec(resolve_model(str(tiny_models.save(tiny_models.make(variant, **changes), tmp_path))))
    with pytest.raises(ConfigError, match=words):
        local_spec(spec, size)
