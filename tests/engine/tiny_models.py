"""Tiny random checkpoints made by transformers, and their logits computed by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 160
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True},
    "llama-llama3-rope": {"rope_parameters": _LLAMA3},
    "llama-linear-rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    "llama-wide-heads": {"head_dim": 32, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 32},
    "qwen3-tied": {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 4},
}


def make(variant: str, **changes: Any) -> Any:
    """A random transformers model in fp32, always the same one; norms and biases are not trivial."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    is_qwen = variant.startswith("qwen3")
    options = {**_SIZES, **VARIANTS[variant], **changes}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: Any = Qwen3ForCausalLM(Qwen3Config(**options)) if is_qwen else LlamaForCausalLM(LlamaConfig(**options))
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    return model.float().eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@torch.inference_mode()
def logits(model: Any, ids: list[int]) -> Tensor:
    """[len(ids), VOCAB]."""
    found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


@torch.inference_mode()
def generate(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def random_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


# Short, long, and with shared beginnings that end on and off the borders of pages.
BASE = random_ids(90, seed=0)
PROMPTS = [
    random_ids(1, seed=1),
    random_ids(33, seed=2),
    BASE[:40],
    BASE[:64],
    BASE + random_ids(50, seed=3),
    BASE + random_ids(20, seed=4),
    random_ids(200, seed=5),
]
