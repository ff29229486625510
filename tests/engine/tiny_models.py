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
_THETA = {"rope_theta": 10_000.0}
_YARN = {"rope_type": "yarn", **_THETA, "factor": 4.0, "original_max_position_embeddings": 64}
# 8 rotary values a head. The oracle takes the short ones for a sequence within the original context, where a server
# decides by the context that it serves: so all sequences of these tests are longer than 8 and shorter than 300.
_LONGROPE = {
    "rope_type": "longrope",
    **_THETA,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.125, 1.25, 1.5],
    "long_factor": [1.0, 2.0, 3.5, 9.0],
}
_WINDOW = {"sliding_window": 24}
_QWEN_WINDOW = {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
_GEMMA = {**_WINDOW, "head_dim": 32, "query_pre_attn_scalar": 20, "num_hidden_layers": 4}
# The first word names the classes in transformers.
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "smollm3": "SmolLM3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3Moe",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
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
    "qwen3-yarn": {"head_dim": 32, "rope_parameters": _YARN},
    "qwen3-window": {"head_dim": 16, **_QWEN_WINDOW},
    "qwen2": {},
    "qwen2-window": {**_QWEN_WINDOW, "tie_word_embeddings": True},
    "qwen3moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen3moe-mixed": {**_EXPERTS, "mlp_only_layers": [1]},
    "mistral": {"sliding_window": None, "head_dim": 32},
    "mistral-window": _WINDOW,
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, **_WINDOW},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "tie_word_embeddings": False},
    "smollm3-listed": {"no_rope_layers": [0, 1, 1], **_WINDOW, "use_sliding_window": True},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3": {**_GEMMA, "sliding_window_pattern": 2},
    "gemma3-linear-rope": {
        **_GEMMA,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "phi3": {**_WINDOW, "rope_parameters": {"rope_type": "default", **_THETA, "partial_rotary_factor": 0.5}},
    "phi3-long": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 8},
    "phi3-short": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 300},
}


def make(variant: str, **changes: Any) -> Any:
    """A random transformers model in fp32, always the same one; norms and biases are not trivial."""
    import transformers

    name = _CLASSES[variant.split("-")[0]]
    new_config = getattr(transformers, f"{'Gemma3Text' if name == 'Gemma3' else name}Config")
    new_model = getattr(transformers, f"{name}ForCausalLM")
    options = {**_SIZES, "pad_token_id": 0, **VARIANTS[variant], **changes}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: Any = new_model(new_config(**options))
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
    found: Tensor = model(torch.tensor([ids], device=model.device)).logits[0]
    return found.cpu()


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
