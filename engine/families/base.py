"""What a family of models says of itself. Everything else is the same decoder, ``engine/decoder.py``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixserve.engine.config_reader import ConfigReader
from radixserve.engine.model_spec import ModelSpec

# What transformers calls the types of layers.
FULL, SLIDING = "full_attention", "sliding_attention"


def one_window(config: ConfigReader, num_layers: int) -> Sequence[str]:
    """All layers are alike: windows if there is one and nothing turns it off."""
    slides = config.values.get("sliding_window") is not None and config.flag("use_sliding_window", True)
    return [SLIDING if slides else FULL] * num_layers


def upper_windows(config: ConfigReader, num_layers: int) -> Sequence[str]:
    """Windows, where they are turned on, from layer ``max_window_layers`` upwards (Qwen)."""
    if not config.flag("use_sliding_window") or config.values.get("sliding_window") is None:
        return [FULL] * num_layers
    first = config.optional_integer("max_window_layers") or 0
    return [SLIDING if index >= first else FULL for index in range(num_layers)]


@dataclass(frozen=True, slots=True)
class Family:
    """``hf_classes``: what ``architectures`` of a config.json may name. ``defaults``: what transformers assumes for
    keys that a config.json leaves out; ``gguf_defaults``: what llama.cpp assumes, over these. ``gguf_mixture``: of two
    families with one ``gguf_name``, this is the one with experts. ``layer_types``: types of that many layers, where the
    configuration does not list them. ``adapt``: changes what the shared keys gave."""

    name: str
    hf_classes: tuple[str, ...]
    gguf_name: str | None = None
    gguf_mixture: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    layer_types: Callable[[ConfigReader, int], Sequence[str]] = one_window
    adapt: Callable[[ModelSpec, ConfigReader], ModelSpec] = lambda spec, config: spec
