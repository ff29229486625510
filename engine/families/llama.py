"""Llama, and what differs from it by defaults only. Everything of exactly its shape calls itself Llama, as SmolLM2."""

from radixserve.engine.families.base import Family

LLAMA = Family("llama", ("LlamaForCausalLM",), "llama", defaults={"bos_token_id": 1, "eos_token_id": 2})

# A sliding window in all layers of its first version. GGUF files call it Llama.
MISTRAL = Family(
    "mistral", ("MistralForCausalLM",), defaults={"sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2}
)

# Phi-3, 3.5 and 4: a window in all layers, LongRoPE over a part of each head, and merged matrices in checkpoints.
PHI3 = Family(
    "phi3",
    ("Phi3ForCausalLM",),
    "phi3",
    defaults={
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32_000,
    },
)
