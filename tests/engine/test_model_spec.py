import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from radixserve.configs.schema import DEFAULT_MODEL
from radixserve.engine.errors import ModelError
from radixserve.engine.gguf_reader import read_gguf
from radixserve.engine.model_config import load_sampling_defaults, load_spec, spec_from_config, spec_from_gguf
from radixserve.engine.model_files import ModelFiles, resolve_model
from radixserve.engine.model_spec import ExpertsSpec, ModelSpec, SamplingDefaults
from radixserve.engine.rope_spec import (
    DynamicScaling,
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "rope_theta": 10000,
}


def rope_of(spec: ModelSpec) -> RopeSpec | None:
    (rope,) = {layer.rope for layer in spec.layers}
    return rope


def test_a_llama_config_is_read():
    spec = spec_from_config(LLAMA)
    assert (spec.family, spec.num_layers, spec.num_heads, spec.num_kv_heads) == ("llama", 2, 4, 2)
    assert (spec.head_dim, rope_of(spec)) == (16, RopeSpec(10000.0, 16))
    assert (spec.bos_token_id, spec.eos_token_ids, spec.dtype) == (1, (2, 3), "float16")
    assert spec.tie_embeddings and not spec.qk_norm and not spec.qkv_bias


def test_a_qwen3_config_normalizes_queries_and_keys_and_has_its_own_head_size():
    spec = spec_from_config(
        {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "use_sliding_window": False}
    )
    assert (spec.family, spec.qk_norm, spec.head_dim) == ("qwen3", True, 32)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ORIGINAL = {"original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1] * 8, "long_factor": [2] * 8}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2}, LinearScaling(2.0)),
        ({"type": "dynamic", "factor": 2}, DynamicScaling(2.0, 512)),
        ({"type": "yarn", "factor": 2, **ORIGINAL}, YarnScaling(2.0, 64, 32.0, 1.0, None, True)),
        ({"type": "su", **FACTORS, **ORIGINAL}, LongRopeScaling((1.0,) * 8, (2.0,) * 8, 64, 8.0, None)),
        (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    ],
)
def test_old_and_new_spelling_of_rope_give_the_same(scaling, expected):
    old = spec_from_config({**LLAMA, "rope_theta": 500_000.0, "rope_scaling": scaling})
    without_theta = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new = spec_from_config({**without_theta, "rope_parameters": {**scaling, "rope_theta": 500_000.0}})
    assert rope_of(old) == rope_of(new) == RopeSpec(500_000.0, 16, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertModel"]}, "BertModel.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope.*yarn"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "1 factors for 8"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention.*sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"lm_head_bias": True}, "lm_head_bias"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be an integer"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_key_value_heads": 3}, "cannot share"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    with pytest.raises(ModelError, match=message):
        spec_from_config({**LLAMA, **change})


def test_the_spec_of_the_default_model():
    spec = load_spec(resolve_model("smollm2-135m-instruct"))
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.num_layers) == ("llama", 49152, 576, 30)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_position) == (9, 3, 64, 8192)
    assert (rope_of(spec), spec.eos_token_ids) == (RopeSpec(100_000.0, 64), (2,))
    assert spec.tie_embeddings


def gguf_with(path: Path, architecture: str = "llama", divisors: list[float] | None = None, **extra: int) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "vocab_size": 100,
    }
    for key, value in {**sizes, **extra}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tensor("output.weight", np.zeros((2, 2), np.float32))
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_rope_divisors_come_from_a_tensor_in_gguf(tmp_path):
    divisors = [1.0, 1.0, 2.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    spec = spec_from_gguf(read_gguf(gguf_with(tmp_path / "m.gguf", divisors=divisors)))
    assert rope_of(spec) == RopeSpec(10_000.0, 16, FrequencyDivisors(tuple(divisors)))
    assert not spec.tie_embeddings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_key_value_heads", -2),
        ("head_dim", -8),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", None),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [[1]]),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", 5),
        ("sliding_window", "wide"),
        ("rope_parameters", [1]),
        ("rope_parameters", {"rope_theta": 0}),
    ],
)
def test_a_config_value_of_a_wrong_kind_is_named(key, value):
    with pytest.raises(ModelError, match=rf"{key.split('_')[-1]}|num_kv_heads|theta"):
        spec_from_config({**LLAMA, key: value})


@pytest.mark.parametrize("key", ["llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"])
def test_a_gguf_value_of_a_wrong_kind_is_named(tmp_path, key):
    gguf = read_gguf(gguf_with(tmp_path / "m.gguf"))
    gguf.metadata[key] = "much"
    with pytest.raises(ModelError, match=f"{key.removeprefix('llama.')} must be a number"):
        spec_from_gguf(gguf)


def test_an_unknown_gguf_architecture_lists_the_supported_ones(tmp_path):
    with pytest.raises(ModelError, match="falcon.*llama"):
        spec_from_gguf(read_gguf(gguf_with(tmp_path / "m.gguf", "falcon")))


def test_control_tokens_that_end_a_turn_of_a_chat_end_an_answer(tmp_path):
    gguf = read_gguf(gguf_with(tmp_path / "m.gguf"))
    tokenizer = {
        "tokens": ["<s>", "<|endoftext|>", "a", "<|end|>", "<|im_end|>"],
        "token_type": np.array([3, 3, 1, 3, 1]),
        "eos_token_id": 1,
    }
    gguf.metadata.update({f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()})
    assert spec_from_gguf(gguf).eos_token_ids == (1, 3)


def test_no_window_is_0_in_the_gguf_files_of_phi_4(tmp_path):
    for window, expected in ((0, None), (24, 24)):
        path = gguf_with(tmp_path / f"{window}.gguf", "phi3", **{"attention.sliding_window": window})
        assert spec_from_gguf(read_gguf(path)).windows == (expected,)


def test_a_llama_with_experts_in_gguf_is_a_mixtral(tmp_path):
    file = read_gguf(gguf_with(tmp_path / "m.gguf", expert_count=8, expert_used_count=2))
    spec = spec_from_gguf(file)
    assert (spec.family, {layer.experts for layer in spec.layers}) == ("mixtral", {ExpertsSpec(8, 2, 128, True)})


def test_mixtures_of_experts_of_other_families_in_gguf_are_refused(tmp_path):
    with pytest.raises(ModelError, match="experts are not supported in the family gemma2"):
        spec_from_gguf(read_gguf(gguf_with(tmp_path / "m.gguf", "gemma2", expert_count=8)))


def write(folder: Path, config: object, generation_config: object) -> ModelFiles:
    for name, value in {"config.json": config, "generation_config.json": generation_config}.items():
        (folder / name).write_text(json.dumps(value))
    return ModelFiles("m", config=folder / "config.json", generation_config=folder / "generation_config.json")


def test_end_of_sequence_ids_of_both_files_are_joined(tmp_path):
    files = write(tmp_path, {**LLAMA, "eos_token_id": 2}, {"eos_token_id": [7, 2]})
    assert load_spec(files).eos_token_ids == (7, 2)


def test_sampling_defaults_come_from_the_generation_config(tmp_path):
    files = write(tmp_path, LLAMA, {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True})
    assert load_sampling_defaults(files) == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert load_sampling_defaults(ModelFiles("m")) == SamplingDefaults()


def test_a_sampling_default_that_is_no_number_is_named():
    with pytest.raises(ModelError, match="temperature"):
        SamplingDefaults.from_generation_config({"temperature": "hot"})


def test_a_config_that_is_not_an_object_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="not a JSON object"):
        load_spec(write(tmp_path, [1], {}))


def test_default_model_is_greedy_unless_told_otherwise():
    assert load_sampling_defaults(resolve_model(DEFAULT_MODEL)) == SamplingDefaults(temperature=0.0)
