"""Quantized checkpoints compute what their weights stand for, and stay as small as they are."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve.configs.schema import ServeConfig
from radixserve.engine.build import build_engine
from radixserve.engine.decoder import Decoder, create_model
from radixserve.engine.errors import ConfigError, ModelError
from radixserve.engine.layers.linear import MatrixStorage
from radixserve.engine.llm import LLM
from radixserve.engine.load_model import load_model
from radixserve.engine.model_config import load_spec, spec_from_config
from radixserve.engine.model_files import resolve_model
from radixserve.engine.quantized_model import check_fp8, form_of, quantize_model
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.sharding import Shard
from radixserve.engine.weights import fill_random
from radixserve.kernels.packing import WeightKind, kind_of
from radixserve.kernels.quantized import QuantizedMatrix
from radixserve.kernels.select import BackendUnavailable, select_native
from radixserve.tests.engine import quantized_checkpoints as formats
from radixserve.tests.engine import tiny_models
from radixserve.tests.engine.quantized_checkpoints import save_quantized

PROMPT = tiny_models.random_ids(70, seed=3)
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCKS = {**FP8, "weight_block_size": list(formats.BLOCK)}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
GPTQ_V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}


def compressed(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True}
    packing = "float-quantized" if kind == "float" else "pack-quantized"
    group = {"weights": weights, "targets": ["Linear"], "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group}, **more}


CASES: dict[str, tuple[formats.Writer, dict[str, Any], str]] = {
    "fp8 by matrix": (formats.fp8_by_matrix, FP8, "fp8"),
    "fp8 by block": (formats.fp8_by_block, BLOCKS, "fp8"),
    "compressed fp8 by matrix": (formats.fp8_by_matrix, compressed("float", 8, "tensor"), "fp8"),
    "compressed fp8 by row": (formats.fp8_by_row, compressed("float", 8, "channel"), "fp8"),
    "awq": (formats.awq, AWQ, "int4"),
    "gptq": (formats.gptq, GPTQ, "int4"),
    "gptq in another order": (formats.gptq_in_another_order, {**GPTQ, "desc_act": True}, "int4"),
    "gptq v2": (formats.gptq_v2, GPTQ_V2, "int4"),
    "compressed int4": (formats.compressed_int4, compressed("int", 4, "group"), "int4"),
    "compressed int4, symmetric": (formats.compressed_int4_symmetric, compressed("int", 4, "group"), "int4"),
}


def logprobs(folder: Path, **options: Any) -> torch.Tensor:
    """Of the prompt's tokens but the first, computed in two chunks."""
    fixed = {"device": "cpu", "cpu_threads": 1, "num_pages": 64, "max_model_len": 256, "max_num_batched_tokens": 48}
    with LLM(str(folder), **{**fixed, **options}) as llm:
        rules = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (answer,) = llm.generate([PROMPT], rules)
    assert answer.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in answer.prompt_logprobs if entry is not None])


def expected_logprobs(oracle: Any) -> torch.Tensor:
    found = tiny_models.logits(oracle, PROMPT).log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def load(folder: Path, packing: str | None = None) -> Decoder:
    files = resolve_model(str(folder))
    options = torch.float32, torch.device("cpu"), 64, packing, lambda what, share: None, Shard()
    return load_model(ServeConfig(model=str(folder)), files, load_spec(files), *options)


def expert_bits(folder: Path) -> int | None:
    """Of the weights in memory, if they are quantized."""
    stack, _ = load(folder).model.layers[0].mlp.experts.stacks
    return stack.form.bits if isinstance(stack, QuantizedMatrix) else None


def description(folder: Path, **options: Any) -> str:
    config = {"model": str(folder), "device": "cpu", "cpu_threads": 1, "num_pages": 64, "max_model_len": 256}
    return build_engine(ServeConfig(**{**config, **options})).description


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantized_weights(case: str, tmp_path: Path) -> None:
    write, config, _ = CASES[case]
    oracle = save_quantized("llama", tmp_path, write, config)
    found = logprobs(tmp_path, cpu_weights="fp32")
    torch.testing.assert_close(found, expected_logprobs(oracle), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("case", "variant"), [("gptq", "qwen2"), ("fp8 by block", "phi3"), ("awq", "gemma2")])
def test_biases_merged_matrices_and_norms_behind(case: str, variant: str, tmp_path: Path) -> None:
    write, config, _ = CASES[case]
    oracle = save_quantized(variant, tmp_path, write, config)
    found = logprobs(tmp_path, cpu_weights="fp32")
    torch.testing.assert_close(found, expected_logprobs(oracle), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("case", "variant", "bits"),
    [
        ("fp8 by block", "qwen3moe-mixed", 8),
        ("compressed fp8 by row", "qwen3moe", 8),
        ("awq", "mixtral", 4),
        ("gptq", "qwen3moe", 4),
        ("compressed int4", "qwen3moe-mixed", 4),
        ("gptq in another order", "qwen3moe", None),
    ],
)
def test_experts_stay_as_narrow_as_stored(case: str, variant: str, bits: int | None, tmp_path: Path) -> None:
    """But for columns in another order, which each expert may have in its own way."""
    inner = {"intermediate_size" if variant == "mixtral" else "moe_intermediate_size": 96}
    oracle = save_quantized(variant, tmp_path, *CASES[case][:2], **inner)
    found = logprobs(tmp_path, cpu_weights="fp32")
    torch.testing.assert_close(found, expected_logprobs(oracle), atol=1e-4, rtol=1e-4)
    assert expert_bits(tmp_path) == bits


def test_experts_whose_columns_do_not_fill_groups_are_dequantized(tmp_path: Path) -> None:
    oracle = save_quantized("qwen3moe-mixed", tmp_path, *CASES["fp8 by block"][:2])
    found = logprobs(tmp_path, cpu_weights="fp32")
    torch.testing.assert_close(found, expected_logprobs(oracle), atol=1e-4, rtol=1e-4)
    assert expert_bits(tmp_path) is None


@pytest.mark.parametrize("case", ["fp8 by block", "awq"])
def test_the_weights_in_memory_are_as_narrow_as_stored(case: str, tmp_path: Path) -> None:
    write, config, kind = CASES[case]
    save_quantized("llama", tmp_path, write, config)
    assert f"in {kind} and float32 (" in description(tmp_path, cpu_weights="fp32")


def test_deterministic_steps_take_quantized_weights(tmp_path: Path) -> None:
    oracle = save_quantized("llama", tmp_path, *CASES["awq"][:2])
    found = logprobs(tmp_path, cpu_weights="fp32", deterministic=True)
    torch.testing.assert_close(found, expected_logprobs(oracle), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("case", "kind"),
    [("awq", WeightKind.Q4), ("compressed int4", WeightKind.Q4), ("gptq in another order", WeightKind.BF16)],
)
def test_native_kernels_keep_4_bits_where_they_can(case: str, kind: WeightKind, tmp_path: Path) -> None:
    """Their minima are rounded to fp16, and what they cannot hold to bf16."""
    try:
        ops = select_native(1, print)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    oracle = save_quantized("llama", tmp_path, *CASES[case][:2])
    model = load(tmp_path, "auto")
    weight = model.model.layers[1].mlp.down_proj.weight
    assert isinstance(weight, torch.Tensor) and kind_of(weight, 96) == kind
    expected = oracle.model.layers[1].mlp.down_proj.weight
    torch.testing.assert_close(ops.embed(torch.arange(64), weight, 96), expected, atol=2e-3, rtol=4e-3)


# ---- --quantization fp8 ----


def test_a_checkpoint_is_rounded_to_fp8_while_it_is_loaded(tmp_path: Path) -> None:
    oracle = tiny_models.make("llama-bias")
    tiny_models.save(oracle, tmp_path)
    found = logprobs(tmp_path, cpu_weights="fp32", quantization="fp8")
    before = expected_logprobs(oracle)
    for name, values in oracle.state_dict().items():
        if "_proj.weight" in name:
            values.copy_(formats.fp8_by_row(values)[1])
    torch.testing.assert_close(found, expected_logprobs(oracle), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, before, atol=1e-2)
    assert "in fp8 and float32 (" in description(tmp_path, cpu_weights="fp32", quantization="fp8")


@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_are_rounded_to_fp8_while_they_are_loaded(is_stacked: bool, tmp_path: Path) -> None:
    oracle = tiny_models.make("qwen3moe", moe_intermediate_size=32)
    path = tiny_models.save(oracle, tmp_path) / "model.safetensors"
    stored = load_file(path)
    meant = {name: formats.fp8_by_row(values)[1] if "_proj" in name else values for name, values in stored.items()}
    if is_stacked:
        for layer in range(3):
            path_of = f"model.layers.{layer}.mlp.experts"
            parts = {
                part: torch.stack([stored.pop(f"{path_of}.{i}.{part}_proj.weight") for i in range(6)])
                for part in ("gate", "up", "down")
            }
            stored[f"{path_of}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
            stored[f"{path_of}.down_proj"] = parts["down"]
    save_file(meant, path, metadata={"format": "pt"})
    oracle = type(oracle).from_pretrained(tmp_path).float().eval()
    save_file(stored, path)
    found = logprobs(tmp_path, cpu_weights="fp32", quantization="fp8")
    torch.testing.assert_close(found, expected_logprobs(oracle), atol=1e-4, rtol=1e-4)
    assert "in fp8 and float32 (" in description(tmp_path, cpu_weights="fp32", quantization="fp8")


@pytest.mark.parametrize(
    ("variant", "config", "kind"),
    [
        ("llama", None, "fp8"),
        ("llama", BLOCKS, "fp8"),
        ("llama", AWQ, "int4"),
        ("qwen3moe", None, "fp8"),
        ("qwen3moe", AWQ, "int4"),
    ],
)
def test_random_weights_are_quantized(variant: str, config: dict[str, Any] | None, kind: str, tmp_path: Path) -> None:
    """By the option, or as the checkpoint of the configuration would be."""
    sizes = {"moe_intermediate_size": 96} if variant == "qwen3moe" else {}
    tiny_models.save(tiny_models.make(variant, **sizes), tmp_path)
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    options = {"load_format": "dummy", "cpu_weights": "fp32", "quantization": "auto" if config else "fp8"}
    assert f"in {kind} and float32 (" in description(tmp_path, **options)
    found = logprobs(tmp_path, **options)
    assert found.isfinite().all() and found.std() > 1e-4


def test_blocks_share_scales_where_merged_matrices_are_whole_ones() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 256,
        "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "quantization_config": {**FP8, "weight_block_size": [128, 128]},
    }  # fmt: skip
    spec = spec_from_config(config)
    assert spec.quantization is not None
    narrow = partial(quantize_model, form=form_of(spec.quantization))
    model = create_model(spec, torch.float32, torch.device("cpu"), 1, narrow)
    forms = {
        path.rpartition(".")[2]: m.matrix.form for path, m in model.named_modules() if isinstance(m, MatrixStorage)
    }
    assert {name: form.height for name, form in forms.items()} == {
        "qkv_proj": 1, "o_proj": 128, "gate_up_proj": 128, "down_proj": 128,
    }  # fmt: skip
    fill_random(model, 0)
    scales = next(m for path, m in model.named_modules() if path.endswith("gate_up_proj")).matrix.scales
    assert all((block == block[0]).all() for block in scales.split(128)) and scales.unique().numel() > 4


def test_quantization_that_does_not_go_together_is_refused_by_name(tmp_path: Path) -> None:
    save_quantized("llama", tmp_path / "awq", *CASES["awq"][:2])
    for model, options, message in [
        (tmp_path / "awq", {"cpu_weights": "fp32"}, r"not quantized, and this one is in int4 \(AWQ, groups of 32\)"),
        ("smollm2-135m-instruct", {"cpu_weights": "fp32"}, "is for safetensors"),
        ("smollm2-135m-instruct", {}, "native CPU kernels, which have --cpu-weights int8"),
    ]:
        with pytest.raises(ConfigError, match=f"quantization fp8 .*{message}.*leave --quantization away"):
            description(Path(model), quantization="fp8", **options)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("quantization", "options", "message"),
    [
        (
            BLOCKS,
            {},
            "a checkpoint in fp8 in blocks of 32 x 64 needs .* 8.9 or later, and this one has 8.0; use one in AWQ",
        ),
        (None, {"quantization": "fp8"}, "quantization fp8 needs .*leave --quantization away"),
        (AWQ, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 needs .*leave --kv-cache-dtype away"),
    ],
)
def test_gpus_without_fp8_are_told_before_anything_is_loaded(
    quantization: dict[str, Any] | None, options: dict[str, Any], message: str
) -> None:
    base = {**tiny_models.make("llama").config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    spec = spec_from_config({**base, "quantization_config": quantization})
    config = ServeConfig(**options)
    with pytest.raises(ConfigError, match=message):
        check_fp8(config, spec, (8, 0))
    check_fp8(config, spec, (8, 9))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; use .*AWQ"),
        ({**GPTQ, "bits": 8}, "bits 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "dynamic": {"+:mlp": {"bits": 8}}}, "dynamic bits 8"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        (compressed("int", 8, "channel"), "int of 8 bits"),
        (compressed("float", 4, "tensor_group"), "float of 4 bits"),
        (compressed("int", 4, "group", format="marlin-24"), "format 'marlin-24'"),
        (compressed("float", 8, "tensor", sparsity_config={"format": "sparse-24"}), "sparsity_config 'sparse-24'"),
        ({"quant_method": "compressed-tensors"}, "0 kinds of weights"),
        ("fp8", "quantization_config must be an object"),
    ],
)
def test_quantizations_that_cannot_be_read_are_named(config: Any, message: str) -> None:
    base = tiny_models.make("llama").config.to_dict()
    with pytest.raises(ModelError, match=message):
        spec_from_config({**base, "architectures": ["LlamaForCausalLM"], "quantization_config": config})


@pytest.mark.parametrize(
    ("case", "name", "change", "message"),
    [
        ("awq", "qzeros", None, "q_proj: scales or qzeros is missing"),
        ("gptq", "g_idx", torch.zeros(64, dtype=torch.int32), "g_idx: its groups are not of 32 columns each"),
        ("fp8 by block", "weight_scale_inv", torch.ones(3, 3), r"weight_scale_inv is \[3, 3\], which does not scale"),
        ("fp8 by block", "weight", torch.zeros(64, 64), "weight is torch.float32, not float8_e4m3fn"),
        ("compressed int4", "weight_scale", torch.ones(64, 3), "3 groups of 64 columns"),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(
    case: str, name: str, change: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    save_quantized("llama", tmp_path, *CASES[case][:2])
    path = tmp_path / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    key = f"model.layers.0.self_attn.q_proj.{name}"
    del tensors[key]
    save_file({**tensors, key: change} if change is not None else tensors, path)
    with pytest.raises(ModelError, match=message):
        description(tmp_path, cpu_weights="fp32")
