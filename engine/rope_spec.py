"""Rotary position embedding as a configuration describes it. No torch: ``layers/rotary.py`` computes the angles."""

import math
from dataclasses import dataclass

from radixserve.engine.config_reader import ConfigReader
from radixserve.engine.errors import ModelError

DIVISORS = "divisors"  # our name for what a GGUF file gives as a tensor instead of a type of scaling
_SUPPORTED = "default, linear, dynamic, llama3, yarn, longrope"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All rotary frequencies are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK scaling of the base by the context length that is served, where that is above the original one."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths above ``original_max_position / low_freq_factor`` are stretched by ``factor``, those below
    ``original_max_position / high_freq_factor`` kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: frequencies with more than ``beta_fast`` turns in the original context are kept, those with fewer than
    ``beta_slow`` divided by ``factor``, and a ramp between, its ends ``truncated`` to whole frequencies. Cosines and
    sines are multiplied by ``attention_factor``."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float | None  # None: as the paper has it
    truncated: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency is divided by its own number: a long one if the context length that is served is above the
    original one, else a short one. Cosines and sines are multiplied by ``attention_factor``."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    stretch: float  # of the context
    attention_factor: float | None  # None: as the paper has it


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """Each rotary frequency is divided by its own number (GGUF's ``rope_freqs.weight``): [rotary_dim / 2] floats."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | FrequencyDivisors


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: frequency i of ``rotary_dim / 2`` is ``theta ** (-2 i / rotary_dim)``, then scaled."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


def read_rope(config: ConfigReader, head_dim: int, layer_type: str) -> RopeSpec:
    """The rope of the layers of a type. transformers 5 writes ``rope_parameters``, flat or for each type of layer;
    before that there were ``rope_theta`` and ``rope_scaling``. Raises ``ModelError``."""
    parameters = config.section("rope_parameters") or config.section("rope_scaling")
    if parameters is not None and layer_type in parameters.values:
        parameters = parameters.section(layer_type)
    own = parameters.values if parameters else {}
    merged = config.over({"rope_theta": 10_000.0, "partial_rotary_factor": 1.0})
    merged = ConfigReader(own, parameters.source if parameters else config.source, config.keys).over(merged.values)
    theta = merged.number("rope_theta")
    rotary_dim = merged.optional_integer("rotary_dim") or int(head_dim * merged.number("partial_rotary_factor"))
    if theta <= 0:
        raise ModelError(f"{config.source}: rope_theta is {theta}; it must be positive")
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(f"rotary dimension {rotary_dim} does not fit heads of {head_dim}")
    kind = own.get("rope_type", own.get("type", "default"))
    return RopeSpec(theta, rotary_dim, _read_scaling(kind, merged, rotary_dim // 2))


def _read_scaling(kind: object, config: ConfigReader, num_frequencies: int) -> RopeScaling | None:
    match kind:
        case "default" | "none" | None:
            return None
        case "linear":
            return LinearScaling(config.number("factor"))
        case "dynamic":
            return DynamicScaling(config.number("factor"), _original_max_position(config))
        case "llama3":
            return Llama3Scaling(
                factor=config.number("factor"),
                low_freq_factor=config.number("low_freq_factor"),
                high_freq_factor=config.number("high_freq_factor"),
                original_max_position=config.integer("original_max_position_embeddings"),
            )
        case "yarn":
            return _read_yarn(config)
        case "longrope" | "su":
            original = _original_max_position(config)
            return LongRopeScaling(
                short_factors=_factors(config, "short_factor", num_frequencies),
                long_factors=_factors(config, "long_factor", num_frequencies),
                original_max_position=original,
                stretch=config.optional_number("factor") or config.integer("max_position_embeddings") / original,
                attention_factor=config.optional_number("attention_factor"),
            )
        case str() if kind == DIVISORS:
            return FrequencyDivisors(_factors(config, DIVISORS, num_frequencies))
    raise ModelError(f"rope scaling {kind!r} is not supported; supported: {_SUPPORTED}")


def _read_yarn(config: ConfigReader) -> YarnScaling:
    original = _original_max_position(config)
    factor = config.optional_number("factor") or config.integer("max_position_embeddings") / original
    attention_factor = config.optional_number("attention_factor")
    mscale, mscale_all_dim = config.optional_number("mscale"), config.optional_number("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim and factor > 1:  # DeepSeek's; one alone has no effect
        attention_factor = (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=config.optional_number("beta_fast") or 32.0,
        beta_slow=config.optional_number("beta_slow") or 1.0,
        attention_factor=attention_factor,
        truncated=config.flag("truncate", True),
    )


def _original_max_position(config: ConfigReader) -> int:
    original = config.optional_integer("original_max_position_embeddings")
    return original or config.integer("max_position_embeddings")


def _factors(config: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """One for each rotary frequency."""
    factors = config.numbers(key)
    if len(factors) != count:
        raise ModelError(f"{config.source}: {len(factors)} factors for {count} rotary frequencies")
    return factors
