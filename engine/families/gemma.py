"""Gemma 2 and 3: norms around both halves of a layer, windows in most layers; Gemma 2 caps scores and logits, Gemma 3
norms queries and keys by head and turns window layers by another base. Of models that also see, the text half."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from radixserve.engine.config_reader import ConfigReader
from radixserve.engine.families.base import FULL, SLIDING, Family
from radixserve.engine.model_spec import ModelSpec, StoredNames
from radixserve.engine.rope_spec import RopeSpec

_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_LAYERS_OF_27B = (46, 62)  # whose scale is of another size than the heads; GGUF files do not say so
_VISION = ("vision_tower.", "multi_modal_projector.")


def _all_but_every(default: int) -> Callable[[ConfigReader, int], Sequence[str]]:
    def layer_types(config: ConfigReader, num_layers: int) -> Sequence[str]:
        every = config.optional_integer("sliding_window_pattern") or default
        return [SLIDING if (index + 1) % every else FULL for index in range(num_layers)]

    return layer_types


def _gemma2(spec: ModelSpec, config: ConfigReader) -> ModelSpec:
    of_27b = spec.hidden_size // spec.num_heads if spec.num_layers in _LAYERS_OF_27B else spec.head_dim
    return replace(
        spec,
        sandwich_norms=True,
        unit_offset_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=config.number("query_pre_attn_scalar", of_27b) ** -0.5,
    )


def _gemma3(spec: ModelSpec, config: ConfigReader) -> ModelSpec:
    spec = replace(_gemma2(spec, config), qk_norm=True)
    if "text_config" in config.values:
        spec = replace(
            spec,
            stored_names=StoredNames(
                replaced=(("language_model.", ""), ("model.language_model.", "model.")),
                ignored=(*_VISION, *(f"model.{name}" for name in _VISION)),
            ),
        )
    parameters = config.section("rope_parameters")
    if parameters is not None and SLIDING in parameters.values:
        return spec
    local = RopeSpec(config.number("rope_local_base_freq"), spec.head_dim)
    layers = (replace(layer, rope=local) if layer.window else layer for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


GEMMA2 = Family(
    "gemma2",
    ("Gemma2ForCausalLM",),
    "gemma2",
    defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    layer_types=_all_but_every(2),
    adapt=_gemma2,
)
GEMMA3 = Family(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    "gemma3",
    defaults={
        **_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    layer_types=_all_but_every(6),
    adapt=_gemma3,
)
