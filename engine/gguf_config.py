"""The metadata of a GGUF file under the names that a ``config.json`` would give it. No torch."""

from typing import Any

import numpy as np

from radixserve.engine.families.base import FULL, SLIDING
from radixserve.engine.gguf_reader import GGUFFile
from radixserve.engine.rope_spec import DIVISORS

# Key of config.json -> key of the metadata, behind the architecture's name.
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "vocab_size": "vocab_size",
    "factor": "rope.scaling.factor",
}
# general.file_type -> dtype; quantized files get the type whose range no checkpoint overflows.
_DTYPES = {0: "float32", 1: "float16"}
# What ends a turn of a chat. Files name one end, mostly that of a text, and leave it to the reader to know these.
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_NORMAL = 1  # type of a token that is text


def config_of_gguf(gguf: GGUFFile) -> dict[str, Any]:
    """What a ``config.json`` of the model would say, but for its architecture."""
    metadata, tensors = gguf.metadata, gguf.tensors
    prefix = f"{metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if not own.get("attention.sliding_window", True):  # 0 in the files of Phi-4, which has none
        del own["attention.sliding_window"]
    config = {key: own[name] for key, name in GGUF_KEYS.items() if name in own}
    config |= {
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(metadata),
        "dtype": _DTYPES.get(metadata.get("general.file_type", -1), "bfloat16"),
        "rope_parameters": _rope_parameters(gguf, own),
    }
    if tokens := metadata.get("tokenizer.ggml.tokens"):
        config["vocab_size"] = len(tokens)
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        config["layer_types"] = [SLIDING if slides else FULL for slides in pattern.tolist()]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    return config


def _end_ids(metadata: dict[str, Any]) -> list[int]:
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ends = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if token in _ENDS_OF_TURN and kind != _NORMAL
    ]
    return list(dict.fromkeys(int(i) for i in (*named, *ends) if i is not None))


def _rope_parameters(gguf: GGUFFile, own: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rotary_dim": own.get("rope.dimension_count"),
        "rope_type": own.get("rope.scaling.type"),
        "factor": own.get("rope.scaling.factor"),
        "attention_factor": own.get("rope.scaling.attn_factor"),
        "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
    }
    if "rope_freqs.weight" in gguf.tensors:
        found |= {"rope_type": DIVISORS, DIVISORS: _floats(gguf, "rope_freqs.weight")}
    if "rope_factors_long.weight" in gguf.tensors:
        factors = {f"{kind}_factor": _floats(gguf, f"rope_factors_{kind}.weight") for kind in ("short", "long")}
        found |= {"rope_type": "longrope", **factors}
    return {key: value for key, value in found.items() if value is not None}


def _floats(gguf: GGUFFile, name: str) -> list[float]:
    values: list[float] = gguf.raw(name).view("<f4").tolist()
    return values
