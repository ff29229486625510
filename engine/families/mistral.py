"""Mistral: Llama with a sliding window in all layers of its first version. GGUF files call it Llama."""

from __future__ import annotations

from radixserve.engine.families.base import Family

MISTRAL = Family(
    "mistral",
    ("MistralForCausalLM",),
    defaults={"sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
)
