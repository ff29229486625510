"""Weights find their place, and files that do not fit the model are refused with names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from radixserve.benchmarks.loading import own_bytes, peak_of_own_bytes
from radixserve.engine.decoder import create_model
from radixserve.engine.errors import ModelError
from radixserve.engine.gguf_reader import read_gguf
from radixserve.engine.gguf_weights import gguf_tensors
from radixserve.engine.model_config import load_spec, spec_from_gguf
from radixserve.engine.model_files import resolve_model
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.weight_packing import model_bytes, pack_model
from radixserve.engine.weights import fill_random, load_weights, safetensors_tensors, weight_places
from radixserve.tests.engine import tiny_models
from radixserve.tests.engine.tiny_ggufs import write_gguf

CPU = torch.device("cpu")
# Largest error, as a share of the largest value of a block, that a round trip may have.
TOLERANCE = {Kind.F32: 0.0, Kind.F16: 1e-3, Kind.BF16: 1e-2, Kind.Q8_0: 1e-2}
QUANTIZABLE = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


SPEC = ModelSpec("llama", 100, 64, 96, 4, 2, 16, 1e-5, (), max_position=64)


def ignore(detail: str, share: float) -> None:
    pass


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    files = resolve_model(str(folder))
    spec = load_spec(files)
    model = create_model(spec, dtype, CPU, 16)
    load_weights(model, safetensors_tensors(files.weights, spec), ignore, num_threads=3)
    return weight_places(model)


def change_weights(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("variant", ["llama", "llama-bias", "llama-tied", "qwen3"])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_every_safetensors_weight_is_in_its_place(variant: str, shard_size: str, tmp_path: Path) -> None:
    oracle = tiny_models.make(variant)
    tiny_models.save(oracle, tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shard_size == "40KB")
    loaded = load(tmp_path)
    for name, weight in oracle.state_dict().items():
        if name in loaded or not oracle.config.tie_word_embeddings:
            assert torch.equal(loaded.pop(name), weight), name
    assert not loaded


def test_weights_are_converted_to_the_type_of_the_model(tmp_path: Path) -> None:
    oracle = tiny_models.make("llama")
    places = load(tiny_models.save(oracle, tmp_path), torch.bfloat16)
    expected = oracle.state_dict()["model.norm.weight"].bfloat16()
    assert torch.equal(places["model.norm.weight"], expected)


def test_missing_unexpected_and_misshaped_weights_are_listed(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make("llama"), tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mystery"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(3)

    change_weights(tmp_path, damage)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "1 tensors missing (model.layers.1.mlp.up_proj.weight)" in message
    assert "1 tensors unexpected (model.layers.0.mystery)" in message
    assert "model.norm.weight is [3], not [64]" in message


@pytest.mark.parametrize("stored_as", [torch.int8, torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_numbers_that_are_no_weights_are_not_taken_for_them(stored_as: torch.dtype, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make("llama"), tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(stored_as)}))
    with pytest.raises(ModelError, match=f"1 tensors of no floating-point type \\({name} is "):
        load(tmp_path)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make("llama"), tmp_path)
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=r"1 tensors stored more than once \(model.norm.weight\)"):
        load(tmp_path)


def test_head_of_a_tied_model_may_be_stored_as_well(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make("llama-tied"), tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(tiny_models.VOCAB, 64)}))
    assert "lm_head.weight" not in load(tmp_path)


def test_unreadable_safetensors_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}garbage")
    with pytest.raises(ModelError, match="model.safetensors"):
        list(safetensors_tensors([path], SPEC))


def test_random_weights_are_small_and_repeatable(tmp_path: Path) -> None:
    spec = load_spec(resolve_model(str(tiny_models.save(tiny_models.make("llama"), tmp_path))))
    one, same, other = (create_model(spec, torch.float32, CPU, 16) for _ in range(3))
    for model, seed in ((one, 1), (same, 1), (other, 2)):
        fill_random(model, seed)
    weight = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(weight_places(one)[weight], weight_places(same)[weight])
    assert not torch.equal(weight_places(one)[weight], weight_places(other)[weight])
    assert 0.015 < float(weight_places(one)[weight].std()) < 0.025
    assert torch.equal(weight_places(one)["model.norm.weight"], torch.ones(64))


def test_progress_rises_to_one(tmp_path: Path) -> None:
    files = resolve_model(str(tiny_models.save(tiny_models.make("llama"), tmp_path)))
    shares: list[float] = []
    spec = load_spec(files)
    model = create_model(spec, torch.float32, CPU, 16)
    load_weights(model, safetensors_tensors(files.weights, spec), lambda detail, share: shares.append(share))
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0) and len(shares) > 10


@pytest.mark.parametrize("packing", [None, "bf16", "int8"])
def test_there_is_no_second_copy_of_weights_in_memory(packing: str | None, tmp_path: Path) -> None:
    spec = replace(SPEC, vocab_size=100_000, hidden_size=512, tie_embeddings=True)
    stored = {"model.embed_tokens.weight": torch.zeros(100_000, 512), "model.norm.weight": torch.zeros(512)}
    save_file({name: values.bfloat16() for name, values in stored.items()}, tmp_path / "model.safetensors")
    del stored
    model = create_model(spec, torch.bfloat16, CPU, 16)
    if packing is not None:
        pack_model(model, packing, {})
    before = own_bytes()
    with peak_of_own_bytes(0.001) as peak:
        load_weights(model, safetensors_tensors([tmp_path / "model.safetensors"], spec), ignore)
    assert peak[0] - before < model_bytes(model) + 30e6, "the file has 102 MB"


# ---- GGUF ----


def load_gguf(path: Path) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    file = read_gguf(path)
    spec = spec_from_gguf(file)
    model = create_model(spec, torch.float32, CPU, 16)
    load_weights(model, gguf_tensors(file, spec), ignore)
    return spec, weight_places(model)


@pytest.mark.parametrize("kind", QUANTIZABLE, ids=lambda kind: kind.name)
@pytest.mark.parametrize("variant", ["llama-bias", "qwen3"])
def test_gguf_weights_come_back_in_their_own_order(variant: str, kind: Kind, tmp_path: Path) -> None:
    oracle = tiny_models.make(variant)
    write_gguf(oracle, tmp_path / "m.gguf", kind)
    _, places = load_gguf(tmp_path / "m.gguf")
    expected = oracle.state_dict()
    assert places.keys() == expected.keys()
    for name, weight in places.items():
        largest = float(expected[name].abs().max())
        tolerance = TOLERANCE.get(kind, 0.15) if weight.dim() == 2 else 0.0
        torch.testing.assert_close(weight, expected[name], atol=largest * tolerance, rtol=0, msg=name)


# What llama.cpp takes for granted and GGUF files do not say.
GGUF_VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "smollm3": {"no_rope_layer_interval": 4},
    "mixtral": {"sliding_window": None},
    "qwen3moe": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "phi3-long": {
        "rope_parameters": {**tiny_models.VARIANTS["phi3-long"]["rope_parameters"], "attention_factor": 1.25}
    },
}


@pytest.mark.parametrize("variant", GGUF_VARIANTS)
def test_a_gguf_file_gives_the_spec_and_the_weights_of_its_checkpoint(variant: str, tmp_path: Path) -> None:
    oracle = tiny_models.make(variant, rms_norm_eps=2.0**-18, **GGUF_VARIANTS[variant])
    expected = load(tiny_models.save(oracle, tmp_path))
    spec, places = load_gguf(write_gguf(oracle, tmp_path / "m.gguf"))
    assert replace(spec, dtype="float32") == load_spec(resolve_model(str(tmp_path), "safetensors"))
    for name, weight in places.items():
        stored = expected[name] if name in expected else stacked(name, expected)
        torch.testing.assert_close(weight, stored, msg=name, rtol=0, atol=1e-6)


def stacked(name: str, places: dict[str, torch.Tensor]) -> torch.Tensor:
    """Experts are one tensor in GGUF."""
    before, _, after = name.partition("experts.")
    return torch.stack([places[f"{before}experts.{expert}.{after}"] for expert in range(6)])


def test_experts_of_an_old_gguf_file_lie_one_by_one(tmp_path: Path) -> None:
    oracle = tiny_models.make("mixtral")
    expected = load_gguf(write_gguf(oracle, tmp_path / "new.gguf"))
    found = load_gguf(write_gguf(oracle, tmp_path / "old.gguf", stacks_experts=False))
    assert found[0] == expected[0] and found[1].keys() == expected[1].keys()
    assert all(torch.equal(weight, expected[1][name]) for name, weight in found[1].items())


K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
I_QUANTS = [Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S]
I_QUANTS += [Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4]


@pytest.mark.parametrize("kind", K_QUANTS + I_QUANTS, ids=lambda kind: kind.name)
def test_gguf_k_and_i_quants_are_read(kind: Kind, tmp_path: Path) -> None:
    """The gguf package cannot make these: random blocks must load as it dequantizes them."""
    oracle = tiny_models.make("qwen3", hidden_size=256, intermediate_size=256)
    write_gguf(oracle, tmp_path / "f32.gguf", Kind.F32)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (256, 256 // block_size * block_bytes), np.uint8)
    replace_tensor(tmp_path / "f32.gguf", tmp_path / "m.gguf", "blk.1.ffn_up.weight", raw, kind)
    _, places = load_gguf(tmp_path / "m.gguf")
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    assert expected.abs().sum() > 0
    assert torch.equal(places["model.layers.1.mlp.up_proj.weight"], expected)


def replace_tensor(source: Path, target: Path, name: str, raw: np.ndarray, kind: Kind) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        replaced = tensor.name == name
        writer.add_tensor(tensor.name, raw if replaced else tensor.data, raw_dtype=kind if replaced else Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_quantization_without_a_reader_is_named(tmp_path: Path) -> None:
    oracle = tiny_models.make("qwen3", hidden_size=256, intermediate_size=256)
    write_gguf(oracle, tmp_path / "f32.gguf", Kind.F32)
    raw = np.zeros((256, gguf.GGML_QUANT_SIZES[Kind.TQ1_0][1]), np.uint8)
    replace_tensor(tmp_path / "f32.gguf", tmp_path / "m.gguf", "blk.1.ffn_up.weight", raw, Kind.TQ1_0)
    with pytest.raises(ModelError, match=r"blk.1.ffn_up.weight is TQ1_0, which is not supported \(F32"):
        load_gguf(tmp_path / "m.gguf")


def test_gguf_missing_tensor_is_listed_by_its_checkpoint_name(tmp_path: Path) -> None:
    oracle = tiny_models.make("llama")
    del oracle.model.layers[2].mlp.up_proj
    write_gguf(oracle, tmp_path / "m.gguf", Kind.F32)
    with pytest.raises(ModelError, match="missing .model.layers.2.mlp.up_proj.weight"):
        load_gguf(tmp_path / "m.gguf")
