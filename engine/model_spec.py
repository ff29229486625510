"""What a model is: sizes, layers, special tokens. No torch. ``model_config`` reads it, ``decoder`` builds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from radixserve.engine.errors import ModelError
from radixserve.engine.quantization import StoredQuantization
from radixserve.engine.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts instead of one feed-forward network: each token goes to ``per_token`` of ``count`` networks
    of ``intermediate_size``; ``normalized``: their weights are made to sum up to 1."""

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer. ``rope`` None: the layer knows no positions. ``window``: how many tokens a
    query sees, itself included; None: all before it."""

    rope: RopeSpec | None
    window: int | None = None
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True)
class StoredNames:
    """How a checkpoint's tensors are called, if not as ``Decoder`` calls them: beginnings to be replaced (by what),
    words between points ``inside`` to be replaced, and beginnings of tensors that are no part of the language model."""

    replaced: tuple[tuple[str, str], ...] = ()
    inside: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def ours(self, stored: str) -> str:
        """The name that ``Decoder`` has for the tensor that is ``stored`` under another."""
        name = next((new + stored[len(old) :] for old, new in self.replaced if stored.startswith(old)), stored)
        words = dict(self.inside)
        return ".".join(words.get(word, word) for word in name.split("."))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts that building and serving a model need.

    ``family``: the name of one of ``families``. ``max_position``: context length in tokens. ``qk_norm``: queries and
    keys are normed by head. ``sandwich_norms``: attention and feed-forward are normed before and after.
    ``unit_offset_norms``: norms multiply by 1 + weight. ``attention_scale`` None: 1 / sqrt(head_dim). ``*_softcap``:
    scores or logits become cap * tanh(x / cap). ``dtype``: the type the weights were made for, a torch name.
    ``quantization``: how the checkpoint keeps its matrices, if not as values of a type.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    layers: tuple[LayerSpec, ...]
    max_position: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sandwich_norms: bool = False
    unit_offset_norms: bool = False
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    quantization: StoredQuantization | None = None
    stored_names: StoredNames = StoredNames()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each window that some layer has, once."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    @property
    def has_experts(self) -> bool:
        return any(layer.experts for layer in self.layers)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters that a model's authors recommend; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """Read a ``generation_config.json``; ``do_sample: false`` there says nothing about what users want."""
        values = {field.name: config[field.name] for field in fields(cls) if config.get(field.name) is not None}
        for key, value in values.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ModelError(f"generation_config.json: {key} must be a number, not {value!r}")
        return cls(**values)
