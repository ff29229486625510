"""Small tokenizers of the families there are, and model folders around them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from radixserve.engine.text.tokenizer import CHAR_OF_BYTE


def sentencepiece_backend() -> Tokenizer:
    """A tokenizer of Llama 2's kind: single characters, a few words, byte fallback, control tokens that strip."""
    words = [
        "▁hello",
        "▁world",
        "▁",
        "he",
        "llo",
        "▁he",
        "hello",
        "a",
        "b",
        "c",
        "d",
        "e",
        "h",
        "l",
        "o",
        "r",
        "w",
        ",",
        ".",
    ]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("h", "e"), ("▁", "he"), ("l", "l"), ("he", "llo"), ("▁he", "llo")]
    merges = [pair for pair in merges if all(part in vocab for part in (*pair, "".join(pair)))]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, rstrip=True)])
    return backend


def byte_level_backend() -> Tokenizer:
    """A byte-level tokenizer without merges: every multi-byte character is several tokens."""
    vocab = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<|a|>", "<|ab|>")])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("two words", special=False)])
    return backend


def word_piece_backend() -> Tokenizer:
    vocab = {
        token: i
        for i, token in enumerate(["[UNK]", "play", "##ing", "##ed", "the", "a", "[SEP]", ",", "don", "'", "t"])
    }
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return backend


def save_model_folder(folder: Path, backend: Tokenizer, tokenizer_config: dict[str, Any]) -> Path:
    """A folder as on the Hub, without weights."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
