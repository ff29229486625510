"""SmolLM3: Llama, but every fourth layer knows no positions."""

from dataclasses import replace

from radixserve.engine.config_reader import ConfigReader
from radixserve.engine.families.base import FULL, SLIDING, Family
from radixserve.engine.model_spec import ModelSpec


def _has_rope(config: ConfigReader, num_layers: int) -> list[bool]:
    listed = config.items("no_rope_layers", int, num_layers)  # 1 where there is rope, in spite of its name
    interval = config.integer("no_rope_layer_interval")
    return [bool(listed[index]) if listed else (index + 1) % interval != 0 for index in range(num_layers)]


def _layer_types(config: ConfigReader, num_layers: int) -> list[str]:
    slides = config.flag("use_sliding_window") and config.values.get("sliding_window") is not None
    return [SLIDING if slides and not has_rope else FULL for has_rope in _has_rope(config, num_layers)]


def _adapt(spec: ModelSpec, config: ConfigReader) -> ModelSpec:
    layers = zip(spec.layers, _has_rope(config, spec.num_layers), strict=True)
    return replace(spec, layers=tuple(layer if rope else replace(layer, rope=None) for layer, rope in layers))


SMOLLM3 = Family(
    "smollm3",
    ("SmolLM3ForCausalLM",),
    "smollm3",
    defaults={
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    layer_types=_layer_types,
    adapt=_adapt,
)
