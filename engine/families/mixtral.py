"""Mixtral: Mistral with a mixture of experts in all layers, whose weights sum up to 1. GGUF files call it Llama."""

from dataclasses import replace

from radixserve.engine.config_reader import ConfigReader
from radixserve.engine.families.base import Family
from radixserve.engine.model_spec import ExpertsSpec, ModelSpec, StoredNames

_STORED_NAMES = StoredNames(
    inside=(("block_sparse_moe", "mlp"), ("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
)


def _adapt(spec: ModelSpec, config: ConfigReader) -> ModelSpec:
    # It is told as a softmax over the chosen experts only, which is the same as one over all, made to sum up to 1.
    experts = ExpertsSpec(
        count=config.integer("num_local_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=spec.intermediate_size,
        normalized=True,
    )
    layers = (replace(layer, experts=experts) for layer in spec.layers)
    return replace(spec, layers=tuple(layers), stored_names=_STORED_NAMES)


MIXTRAL = Family(
    "mixtral",
    ("MixtralForCausalLM",),
    "llama",
    gguf_mixture=True,
    defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    adapt=_adapt,
)
