"""What a model is, read from its configuration: sizes, rotary embedding, special tokens. No torch.

``ARCHITECTURES`` is the one list of supported architectures; the code that builds models registers against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from radixserve.configs.schema import DEFAULT_MODEL
from radixserve.engine.errors import ModelError
from radixserve.engine.gguf_reader import GGUFFile, read_gguf
from radixserve.engine.model_files import ModelFiles, read_json

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported architecture and the names that files give it."""

    name: str
    hf_classes: tuple[str, ...]
    gguf_name: str
    qk_norm: bool = False


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", ("LlamaForCausalLM", "MistralForCausalLM"), "llama"),
    Architecture("qwen3", ("Qwen3ForCausalLM",), "qwen3", qk_norm=True),
)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All rotary frequencies are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths above ``original_max_position / low_freq_factor`` are stretched by ``factor``, those below
    ``original_max_position / high_freq_factor`` kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """Each rotary frequency is divided by its own number (GGUF's ``rope_freqs.weight``): [rotary_dim / 2] floats."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | FrequencyDivisors


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: frequency i of ``rotary_dim / 2`` is ``theta ** (-2 i / rotary_dim)``, then scaled."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts that building and serving a model need.

    ``architecture``: a name of ``ARCHITECTURES``. ``attention_bias``: q, k, v and o projections have biases.
    ``max_position``: context length in tokens. ``dtype``: the type the weights were made for, a torch name.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    max_position: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    @classmethod
    def from_config(cls, config: Json) -> ModelSpec:
        """Read a Hugging Face ``config.json``. Raises ``ModelError`` naming what is missing or not supported."""
        architecture = _architecture_of_config(config)
        _refuse_unsupported(config)
        reader = _Reader(config, "config.json")
        num_heads = reader.integer("num_attention_heads")
        hidden_size = reader.integer("hidden_size")
        head_dim = reader.optional_integer("head_dim") or hidden_size // num_heads
        return _checked(
            cls(
                architecture=architecture.name,
                vocab_size=reader.integer("vocab_size"),
                hidden_size=hidden_size,
                intermediate_size=reader.integer("intermediate_size"),
                num_layers=reader.integer("num_hidden_layers"),
                num_heads=num_heads,
                num_kv_heads=reader.optional_integer("num_key_value_heads") or num_heads,
                head_dim=head_dim,
                rms_eps=reader.number("rms_norm_eps", 1e-6),
                rope=_rope_of_config(config, head_dim),
                max_position=reader.integer("max_position_embeddings"),
                tie_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                qk_norm=architecture.qk_norm,
                bos_token_id=reader.optional_integer("bos_token_id"),
                eos_token_ids=_token_ids(config, "config.json"),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            )
        )

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> ModelSpec:
        """Read the metadata of a GGUF file. Raises ``ModelError`` naming what is missing or not supported."""
        name = gguf.metadata.get("general.architecture")
        architecture = next((a for a in ARCHITECTURES if a.gguf_name == name), None)
        if architecture is None:
            raise _unsupported_architecture(str(name), [a.gguf_name for a in ARCHITECTURES])
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
        if own.get("expert_count"):
            raise ModelError(f"{gguf.path}: mixture-of-experts models are not supported")
        reader = _Reader(own, f"{gguf.path.name}, {name}")
        hidden_size, num_heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
        head_dim = reader.optional_integer("attention.key_length") or hidden_size // num_heads
        eos_ids = [gguf.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return _checked(
            cls(
                architecture=architecture.name,
                vocab_size=_gguf_vocab_size(gguf, reader),
                hidden_size=hidden_size,
                intermediate_size=reader.integer("feed_forward_length"),
                num_layers=reader.integer("block_count"),
                num_heads=num_heads,
                num_kv_heads=reader.optional_integer("attention.head_count_kv") or num_heads,
                head_dim=head_dim,
                rms_eps=reader.number("attention.layer_norm_rms_epsilon", 1e-6),
                rope=_rope_of_gguf(gguf, reader, head_dim),
                max_position=reader.integer("context_length"),
                tie_embeddings="output.weight" not in gguf.tensors,
                attention_bias="blk.0.attn_q.bias" in gguf.tensors,
                qk_norm=architecture.qk_norm,
                bos_token_id=gguf.metadata.get("tokenizer.ggml.bos_token_id"),
                eos_token_ids=tuple(dict.fromkeys(int(i) for i in eos_ids if i is not None)),
                dtype=_GGUF_DTYPES.get(gguf.metadata.get("general.file_type", -1), "bfloat16"),
            )
        )


# general.file_type -> dtype; quantized files get the type whose range no checkpoint overflows.
_GGUF_DTYPES = {0: "float32", 1: "float16"}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters that a model's authors recommend; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_generation_config(cls, config: Json) -> SamplingDefaults:
        """Read a ``generation_config.json``; ``do_sample: false`` there says nothing about what users want."""
        values = {field.name: config[field.name] for field in fields(cls) if config.get(field.name) is not None}
        for key, value in values.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ModelError(f"generation_config.json: {key} must be a number, not {value!r}")
        return cls(**values)


def load_spec(files: ModelFiles) -> ModelSpec:
    """The spec of a resolved model; end-of-sequence ids of ``generation_config.json`` come before ``config.json``'s."""
    if files.gguf:
        return ModelSpec.from_gguf(read_gguf(files.gguf))
    assert files.config is not None, "ModelFiles has either a GGUF file or a config"
    spec = ModelSpec.from_config(read_json(files.config))
    if not files.generation_config:
        return spec
    eos_ids = _token_ids(read_json(files.generation_config), "generation_config.json")
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(eos_ids + spec.eos_token_ids)))


def load_sampling_defaults(files: ModelFiles) -> SamplingDefaults:
    """What ``generation_config.json`` recommends; nothing without one (GGUF files have none). The default model comes
    without it and is greedy: so small a model rambles when it is sampled, in its card's 0.2 as well."""
    if files.name == DEFAULT_MODEL and files.gguf:
        return SamplingDefaults(temperature=0.0)
    if not files.generation_config:
        return SamplingDefaults()
    return SamplingDefaults.from_generation_config(read_json(files.generation_config))


def _architecture_of_config(config: Json) -> Architecture:
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise ModelError(f"config.json: architectures must be a list, not {classes!r}")
    for architecture in ARCHITECTURES:
        if any(name in architecture.hf_classes for name in classes):
            return architecture
    named = ", ".join(map(str, classes)) or str(config.get("model_type", "(none named)"))
    raise _unsupported_architecture(named, [name for a in ARCHITECTURES for name in a.hf_classes])


def _unsupported_architecture(name: str, supported: list[str]) -> ModelError:
    return ModelError(f"architecture {name} is not supported; supported: {', '.join(supported)}")


def _refuse_unsupported(config: Json) -> None:
    """Features that would silently give wrong results if they were ignored."""
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    if config.get("mlp_bias"):
        raise ModelError("mlp_bias is not supported")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelError(f"quantization {method!r} is not supported in safetensors; use an unquantized or a GGUF model")
    reader = _Reader(config, "config.json")
    window = reader.optional_integer("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and window < reader.integer("max_position_embeddings"):
        raise ModelError(f"sliding_window {window} is not supported; a smaller max_position_embeddings avoids it")


def _rope_of_config(config: Json, head_dim: int) -> RopeSpec:
    """transformers 5 writes ``rope_parameters``; before that there were ``rope_theta`` and ``rope_scaling``."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"config.json: the rope parameters must be an object, not {parameters!r}")
    merged = {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0, **config, **parameters}
    reader = _Reader(merged, "config.json")
    rotary_dim = int(head_dim * reader.number("partial_rotary_factor"))
    return RopeSpec(reader.number("rope_theta"), rotary_dim, _rope_scaling(parameters))


def _rope_scaling(parameters: Json) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    reader = _Reader(parameters, "config.json, rope scaling")
    match kind:
        case "default" | "none" | None:
            return None
        case "linear":
            return LinearScaling(reader.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=reader.number("factor"),
                low_freq_factor=reader.number("low_freq_factor"),
                high_freq_factor=reader.number("high_freq_factor"),
                original_max_position=reader.integer("original_max_position_embeddings"),
            )
    raise ModelError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")


def _rope_of_gguf(gguf: GGUFFile, reader: _Reader, head_dim: int) -> RopeSpec:
    own, theta = reader.values, reader.number("rope.freq_base", 10_000.0)
    rotary_dim = reader.optional_integer("rope.dimension_count") or head_dim
    if "rope_freqs.weight" in gguf.tensors:
        divisors = gguf.raw("rope_freqs.weight").view("<f4").tolist()
        return RopeSpec(theta, rotary_dim, FrequencyDivisors(tuple(divisors)))
    scaling = {"rope_type": own.get("rope.scaling.type"), "factor": own.get("rope.scaling.factor")}
    return RopeSpec(theta, rotary_dim, _rope_scaling(scaling))


def _gguf_vocab_size(gguf: GGUFFile, reader: _Reader) -> int:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if tokens else reader.integer("vocab_size")


def _checked(spec: ModelSpec) -> ModelSpec:
    """Sizes that do not fit together would fail later, far from their cause."""
    for name, value in (("num_kv_heads", spec.num_kv_heads), ("head_dim", spec.head_dim), ("theta", spec.rope.theta)):
        if value <= 0:
            raise ModelError(f"the model's configuration gives {name} {value}; it must be positive")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads")
    if not 0 < spec.rope.rotary_dim <= spec.head_dim or spec.rope.rotary_dim % 2:
        raise ModelError(f"rotary dimension {spec.rope.rotary_dim} does not fit heads of {spec.head_dim}")
    return spec


def _token_ids(config: Json, source: str) -> tuple[int, ...]:
    """``eos_token_id`` may be absent, one id or a list of them."""
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(f"{source}: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed look-ups whose errors name the key and where it was looked for."""

    values: Json
    source: str

    def integer(self, key: str) -> int:
        """A size or count, so 1 or more."""
        value = self.optional_integer(key)
        if value is None:
            raise ModelError(f"{self.source}: {key} is missing")
        if value <= 0:
            raise ModelError(f"{self.source}: {key} is {value}; it must be positive")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.source}: {key} must be an integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.source}: {key} must be a number, not {value!r}")
        return float(value)
