"""Writes tiny checkpoints as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

_ARCHITECTURES = {"gemma3_text": "gemma3", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
Weights = dict[str, NDArray[np.float32]]


def write_gguf(oracle: Any, path: Path, kind: Kind = Kind.F32, *, stacks_experts: bool = True) -> Path:
    """Matrices become ``kind``; experts are a tensor of all, or, as in files of 2023, each its own."""
    config = oracle.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config)
    weights = {name: weight.numpy() for name, weight in oracle.state_dict().items()}
    known = getattr(gguf.MODEL_ARCH, architecture.upper())
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    for name, values in _converted(architecture, config, weights).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        used = kind if values.ndim > 1 else Kind.F32
        parts = {stored: values}
        if values.ndim == 3 and not stacks_experts:
            parts = {stored.replace("_exps", f".{expert}"): part for expert, part in enumerate(values)}
        for part_name, part in parts.items():
            writer.add_tensor(part_name, gguf.quantize(part, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])


def _converted(architecture: str, config: Any, weights: Weights) -> Weights:
    """Names stay Hugging Face's where they have one."""
    found: Weights = {}
    for name, values in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture in ("llama", "smollm3") and "q_proj" in name:
            values = _neighbour_pairs(values, config.num_attention_heads)
        if architecture in ("llama", "smollm3") and "k_proj" in name:
            values = _neighbour_pairs(values, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            found |= {name.replace("gate_up", "gate") + ".weight": gate, name.replace("gate_up", "up") + ".weight": up}
        else:
            found[name + ".weight" if name.endswith("experts.down_proj") else name] = np.ascontiguousarray(values)
    if config.rope_parameters.get("rope_type") == "longrope":
        for which in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{which}_factor"], np.float32)
            found[f"rope_factors_{which}.weight"] = factors
    return found


def _neighbour_pairs(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """The order of rows in a head that llama.cpp's rotation wants."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
