"""What configurations on the Hub leave out, and models whose language half is one part of several."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve.configs.schema import ServeConfig
from radixserve.engine.decoder import create_model
from radixserve.engine.errors import ConfigError
from radixserve.engine.families.base import Family
from radixserve.engine.families.registry import FAMILIES
from radixserve.engine.load_model import load_model, weight_bytes
from radixserve.engine.model_config import load_spec, spec_from_config
from radixserve.engine.model_files import ModelFiles, resolve_model
from radixserve.engine.model_spec import ExpertsSpec, ModelSpec
from radixserve.engine.rope_spec import LinearScaling, RopeSpec, YarnScaling
from radixserve.engine.sharding import Shard
from radixserve.engine.weights import load_weights, safetensors_tensors, weight_places
from radixserve.tests.engine import tiny_models

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}


def spec_of(hf_class: str, **config: Any) -> ModelSpec:
    return spec_from_config({**SIZES, "architectures": [hf_class], **config})


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.window for layer in spec.layers]


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_what_a_configuration_leaves_out_is_what_transformers_assumes(family: Family) -> None:
    import transformers

    hf_class = family.hf_classes[0]
    name = hf_class.removesuffix("ForCausalLM").replace("Gemma3", "Gemma3Text") + "Config"
    sizes = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"}
    whole = getattr(transformers, name)(**{**sizes, "bos_token_id": None, "eos_token_id": None}).to_dict()
    default = getattr(transformers, name)()
    ids = {"bos_token_id": default.bos_token_id, "eos_token_id": default.eos_token_id}
    assert spec_from_config({**sizes, "architectures": [hf_class]}) == spec_from_config(
        {**whole, **ids, "architectures": [hf_class]}
    )


def test_the_text_half_of_gemma_3_says_only_what_differs_from_the_defaults() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 12, "sliding_window": 1024}
    text["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    spec = spec_from_config(config)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert spec.tie_embeddings and spec.qk_norm and spec.attention_scale == 1 / 16 and spec.eos_token_ids == (1, 106)
    assert windows(spec) == ([1024] * 5 + [None]) * 2
    assert spec.layers[0].rope == RopeSpec(10_000.0, 256)
    assert spec.layers[5].rope == RopeSpec(1_000_000.0, 256, LinearScaling(8.0))


def test_gemma_2_takes_turns_and_caps() -> None:
    spec = spec_of("Gemma2ForCausalLM", query_pre_attn_scalar=144)
    assert windows(spec) == [4096, None] * 3
    assert (spec.attention_softcap, spec.final_softcap, spec.attention_scale) == (50.0, 30.0, 1 / 12)


def test_windows_of_qwen_and_mistral_are_where_they_are_turned_on() -> None:
    assert windows(spec_of("Qwen2ForCausalLM", sliding_window=4096, max_window_layers=2)) == [None] * 6
    on = spec_of("Qwen2ForCausalLM", sliding_window=4096, max_window_layers=4, use_sliding_window=True)
    assert windows(on) == [None] * 4 + [4096] * 2
    assert windows(spec_of("MistralForCausalLM")) == [4096] * 6
    assert windows(spec_of("MistralForCausalLM", sliding_window=None)) == [None] * 6
    # One that no context is long enough for.
    assert windows(spec_of("Phi3ForCausalLM", sliding_window=262_144)) == [None] * 6


def test_every_fourth_layer_of_smollm3_has_no_positions() -> None:
    spec = spec_of("SmolLM3ForCausalLM")
    assert [layer.rope is None for layer in spec.layers] == [False, False, False, True, False, False]
    assert spec.layers[0].rope == RopeSpec(2_000_000.0, 64)


def test_experts_are_in_the_layers_that_the_configuration_says() -> None:
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
    spec = spec_of("Qwen3MoeForCausalLM", **experts, decoder_sparse_step=2, mlp_only_layers=[3])
    expected = ExpertsSpec(count=16, per_token=4, intermediate_size=64, normalized=True)
    assert [layer.experts for layer in spec.layers] == [None, expected, None, None, None, expected]


def test_yarn_gives_the_context_that_it_stretches_to() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = spec_of("Qwen3ForCausalLM", max_position_embeddings=40960, rope_scaling=scaling)
    assert spec.max_position == 131_072
    assert spec.layers[0].rope == RopeSpec(10_000.0, 128, YarnScaling(4.0, 32768, 32.0, 1.0, None, True))


@pytest.mark.parametrize("before", ["language_model.model.", "model.language_model."])
def test_the_language_model_is_taken_out_of_one_that_also_sees(before: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_models.save(tiny_models.make("gemma3"), tmp_path)
    expected = load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {before + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    vision = "vision_tower.layer.weight" if before.startswith("language") else "model.vision_tower.layer.weight"
    save_file({**renamed, vision: torch.zeros(2)}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = load(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def load(folder: Path) -> dict[str, torch.Tensor]:
    files = resolve_model(str(folder))
    spec = load_spec(files)
    model = create_model(spec, torch.float32, CPU, 16)
    load_weights(model, safetensors_tensors(files.weights, spec), lambda what, share: None)
    return weight_places(model)


def test_a_model_larger_than_memory_is_refused_before_it_takes_any() -> None:
    spec = spec_of("LlamaForCausalLM", hidden_size=1 << 20, num_attention_heads=1 << 13, num_key_value_heads=1 << 13)
    assert weight_bytes(spec, torch.float16) > 6 * 2 * 4 * 2**40
    config = ServeConfig(load_format="dummy")
    with pytest.raises(ConfigError, match=r"weights take [\d.]+ GiB, but [\d.]+ GiB are free on cpu.*--dtype"):
        load_model(config, ModelFiles("huge"), spec, torch.float16, CPU, 16, None, lambda what, share: None, Shard())
