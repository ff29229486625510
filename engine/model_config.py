"""Reads a model's configuration, of a Hugging Face folder or a GGUF file, into a ``ModelSpec``. No torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from radixserve.configs.schema import DEFAULT_MODEL
from radixserve.engine.config_reader import ConfigReader
from radixserve.engine.errors import ModelError
from radixserve.engine.families.base import FULL, SLIDING, Family
from radixserve.engine.families.registry import FAMILIES
from radixserve.engine.gguf_config import GGUF_KEYS, config_of_gguf
from radixserve.engine.gguf_reader import GGUFFile, read_gguf
from radixserve.engine.model_files import ModelFiles, read_json
from radixserve.engine.model_spec import LayerSpec, ModelSpec, SamplingDefaults
from radixserve.engine.quantization import read_quantization
from radixserve.engine.rope_spec import DynamicScaling, RopeSpec, YarnScaling, read_rope

_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What would silently give wrong results if it was ignored.
_REFUSED_FLAGS = (
    "mlp_bias",
    "lm_head_bias",
    "use_bidirectional_attention",
    "attention_chunk_size",
    "shared_expert_intermediate_size",
    "n_shared_experts",
)


def load_spec(files: ModelFiles) -> ModelSpec:
    """The spec of a resolved model; end-of-sequence ids of ``generation_config.json`` come before ``config.json``'s."""
    if files.gguf:
        return spec_from_gguf(read_gguf(files.gguf))
    assert files.config is not None, "ModelFiles has either a GGUF file or a config"
    spec = spec_from_config(read_json(files.config))
    if not files.generation_config:
        return spec
    eos_ids = ConfigReader(read_json(files.generation_config), "generation_config.json").token_ids("eos_token_id")
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(eos_ids + spec.eos_token_ids)))


def load_sampling_defaults(files: ModelFiles) -> SamplingDefaults:
    """What ``generation_config.json`` recommends; nothing without one (GGUF files have none). The default model comes
    without it and is greedy: so small a model rambles when it is sampled, in its card's 0.2 as well."""
    if files.name == DEFAULT_MODEL and files.gguf:
        return SamplingDefaults(temperature=0.0)
    if not files.generation_config:
        return SamplingDefaults()
    return SamplingDefaults.from_generation_config(read_json(files.generation_config))


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a Hugging Face ``config.json``. Raises ``ModelError`` naming what is missing or not supported."""
    family = _family_of_config(config)
    reader = ConfigReader(config, "config.json")
    if text := reader.section("text_config"):  # the language model inside of one that also sees
        reader = ConfigReader({**config, **text.values}, text.source)
    return _spec(family, reader.over(family.defaults))


def spec_from_gguf(gguf: GGUFFile) -> ModelSpec:
    """Read the metadata of a GGUF file. Raises ``ModelError`` naming what is missing or not supported."""
    name = str(gguf.metadata.get("general.architecture"))
    known = {(family.gguf_name, family.gguf_mixture): family for family in FAMILIES if family.gguf_name}
    family = known.get((name, bool(gguf.metadata.get(f"{name}.expert_count")))) or known.get((name, False))
    if family is None:
        raise _unsupported(name, list(dict.fromkeys(str(gguf_name) for gguf_name, _ in known)))
    try:
        values = config_of_gguf(gguf)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{gguf.path.name} has metadata of a wrong type (damaged?): {error}") from error
    reader = ConfigReader(values, f"{gguf.path.name}, {name}", GGUF_KEYS)
    return _spec(family, reader.over({**family.defaults, **family.gguf_defaults}))


def _spec(family: Family, config: ConfigReader) -> ModelSpec:
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = config.optional_integer("head_dim") or hidden_size // num_heads
    layers = _layers(family, config, head_dim)
    has_bias = config.flag("attention_bias")
    activation = config.values.get("hidden_activation") or config.values.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ModelError(f"hidden_act {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    spec = ModelSpec(
        family=family.name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.optional_integer("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        layers=layers,
        max_position=_max_position(config.integer("max_position_embeddings"), layers[0].rope),
        tie_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=has_bias,
        o_bias=has_bias,
        activation=_ACTIVATIONS[activation],
        attention_softcap=config.optional_number("attn_logit_softcapping"),
        final_softcap=config.optional_number("final_logit_softcapping"),
        bos_token_id=config.optional_integer("bos_token_id"),
        eos_token_ids=config.token_ids("eos_token_id"),
        dtype=str(config.values.get("dtype") or config.values.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        quantization=read_quantization(config),
    )
    spec = family.adapt(spec, config)
    _check(config, spec)
    return _without_idle_windows(spec)


def _layers(family: Family, config: ConfigReader, head_dim: int) -> tuple[LayerSpec, ...]:
    count = config.integer("num_hidden_layers")
    types = config.items("layer_types", str, count) or family.layer_types(config, count)
    if strange := sorted(set(types) - {FULL, SLIDING}):
        raise ModelError(f"{config.source}: layer type {strange[0]!r} is not supported; supported: {FULL}, {SLIDING}")
    window = config.integer("sliding_window") if SLIDING in types else None
    ropes = {kind: read_rope(config, head_dim, kind) for kind in sorted(set(types))}
    return tuple(LayerSpec(ropes[kind], window if kind == SLIDING else None) for kind in types[:count])


def _without_idle_windows(spec: ModelSpec) -> ModelSpec:
    """A window as wide as the context hides nothing, but kernels would look at it."""
    layers = (
        layer if layer.window is None or layer.window < spec.max_position else replace(layer, window=None)
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def _max_position(declared: int, rope: RopeSpec | None) -> int:
    """What is declared is mostly the context that scaling gives; for two kinds it may be the one before scaling."""
    match rope.scaling if rope else None:
        case DynamicScaling(factor, original) | YarnScaling(factor, original):
            return max(declared, int(factor * original))
    return declared


def _family_of_config(config: Mapping[str, Any]) -> Family:
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise ModelError(f"config.json: architectures must be a list, not {classes!r}")
    for family in FAMILIES:
        if any(name in family.hf_classes for name in classes):
            return family
    named = ", ".join(map(str, classes)) or str(config.get("model_type", "(none named)"))
    raise _unsupported(named, [name for family in FAMILIES for name in family.hf_classes])


def _unsupported(name: str, supported: list[str]) -> ModelError:
    return ModelError(f"architecture {name} is not supported; supported: {', '.join(supported)}")


def _check(config: ConfigReader, spec: ModelSpec) -> None:
    """Refuses what gives wrong results if it is ignored, and sizes that would fail later, far from their cause."""
    for key in _REFUSED_FLAGS:
        if config.flag(key):
            raise ModelError(f"{config.source}: {key} is not supported")
    if not spec.has_experts and (config.flag("num_experts") or config.flag("num_local_experts")):
        raise ModelError(f"{config.source}: mixtures of experts are not supported in the family {spec.family}")
    for name, value in (("num_kv_heads", spec.num_kv_heads), ("head_dim", spec.head_dim)):
        if value <= 0:
            raise ModelError(f"the model's configuration gives {name} {value}; it must be positive")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads")
    for experts in (layer.experts for layer in spec.layers if layer.experts):
        if experts.per_token > experts.count:
            raise ModelError(f"{experts.per_token} experts for each token, but there are {experts.count}")
