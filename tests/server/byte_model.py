"""A model folder whose tokenizer has one token a byte, with id and byte alike, and a small ChatML template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from radixserve.engine.text.tokenizer import BYTE_OF_CHAR

SPECIAL_TOKENS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")  # ids from 256 on
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' and m.content == 'boom' %}{{ raise_exception('NO-TOOLS') }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 262,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
}


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return tokenizer


def write_byte_model(
    folder: Path, *, template: str | None = TEMPLATE, generation: dict[str, object] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
