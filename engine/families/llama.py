"""Llama 2 and 3, and everything of exactly its shape, as SmolLM2."""

from __future__ import annotations

from radixserve.engine.families.base import Family

LLAMA = Family("llama", ("LlamaForCausalLM",), "llama", defaults={"bos_token_id": 1, "eos_token_id": 2})
