"""Qwen 2 and 2.5, whose queries, keys and values have biases; Qwen 3, which norms queries and keys by head; and
Qwen 3 MoE, with a mixture of experts in most layers."""

from dataclasses import replace

from radixserve.engine.config_reader import ConfigReader
from radixserve.engine.families.base import Family, upper_windows
from radixserve.engine.model_spec import ExpertsSpec, ModelSpec


def _qwen3_moe(spec: ModelSpec, config: ConfigReader) -> ModelSpec:
    experts = ExpertsSpec(
        count=config.optional_integer("num_local_experts") or config.integer("num_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalized=config.flag("norm_topk_prob"),
    )
    dense, step = config.items("mlp_only_layers", int) or [], config.integer("decoder_sparse_step")
    layers = tuple(
        layer if index in dense or (index + 1) % step else replace(layer, experts=experts)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, qk_norm=True, layers=layers)


_NO_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}

QWEN2 = Family(
    "qwen2",
    ("Qwen2ForCausalLM",),
    "qwen2",
    defaults={**_NO_WINDOW, "max_window_layers": 28},
    layer_types=upper_windows,
    adapt=lambda spec, config: replace(spec, qkv_bias=True, o_bias=False),
)
QWEN3 = Family(
    "qwen3",
    ("Qwen3ForCausalLM",),
    "qwen3",
    defaults={**_NO_WINDOW, "max_window_layers": 28, "head_dim": 128},
    layer_types=upper_windows,
    adapt=lambda spec, config: replace(spec, qk_norm=True),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    "qwen3moe",
    defaults={
        **_NO_WINDOW,
        "decoder_sparse_step": 1,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    gguf_defaults={"norm_topk_prob": True},
    adapt=_qwen3_moe,
)
