"""Phi-3, 3.5 and 4: Llama with a window in all layers, LongRoPE over a part of each head, and merged matrices in its
checkpoints."""

from __future__ import annotations

from radixserve.engine.families.base import Family

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
