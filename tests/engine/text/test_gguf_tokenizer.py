from typing import Any

import pytest

from radixserve.engine.errors import ModelError
from radixserve.engine.gguf_reader import read_gguf
from radixserve.engine.model_files import resolve_model
from radixserve.engine.text.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens

from .corpus import HARD, random_texts

TEXTS = HARD + random_texts(800, seed=11)


@pytest.fixture(scope="module")
def byte_level_metadata() -> dict[str, Any]:
    path = resolve_model("smollm2-135m-instruct").gguf
    assert path is not None
    return read_gguf(path).metadata


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Llama 2's kind of vocabulary: control, byte and single-character tokens, then words by falling score."""
    words = ["the", "and", "ing", "er", "on", "is", "world", "hello", "he", "llo", "wor", "ld", "or", "th", "an", "in"]
    words += ["▁the", "▁and", "▁hello", "▁world", "▁is", "▁u", "▁w", "▁h", "▁a", "▁t", "▁▁", "▁▁▁▁"]
    characters = sorted({*"".join(words), *"abcdefghijklmnopqrstuvwxyz.,!0123456789é日"})
    pieces = [*characters, *[word for word in words if len(word) > 1]]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces, "<tool>"]
    plain = len(tokens) - 260
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(plain)] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * plain + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def transformers_backend(metadata: dict[str, Any]) -> Any:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    values = {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
    values["token_type"] = list(values["token_type"])
    return convert_gguf_tokenizer(metadata["general.architecture"], values)[0]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_pre_tokenizers_equal_transformers(byte_level_metadata: dict[str, Any], pre: str):
    metadata = {**byte_level_metadata, "tokenizer.ggml.pre": pre}
    ours, theirs = build_gguf_tokenizer(metadata).pre_tokenizer, transformers_backend(metadata).pre_tokenizer
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def test_a_word_of_the_vocabulary_is_taken_whole_in_llama_3(byte_level_metadata: dict[str, Any]):
    metadata = {**byte_level_metadata, "tokenizer.ggml.merges": ["Ġ t"]}
    hello = byte_level_metadata["tokenizer.ggml.tokens"].index("Hello")
    whole = build_gguf_tokenizer({**metadata, "tokenizer.ggml.pre": "llama-bpe"})
    assert whole.encode("Hello", add_special_tokens=False).ids == [hello]
    assert len(build_gguf_tokenizer({**metadata, "tokenizer.ggml.pre": "gpt-2"}).encode("Hello").ids) == 5


def test_sentencepiece_equals_transformers():
    metadata = sentencepiece_metadata()
    ours, theirs = build_gguf_tokenizer(metadata), transformers_backend(metadata)
    texts = [*TEXTS, "hello world and the user", " hello", "hello  world", "a<tool>b", "<s>the</s> and", "thinging"]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == theirs.decode(ids)


def test_the_space_before_the_first_word_can_be_turned_off():
    for adds_space in (True, False):
        tokenizer = build_gguf_tokenizer(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": adds_space}))
        encoded = tokenizer.encode("hello hello", add_special_tokens=False)
        assert encoded.tokens[0].startswith("▁") == adds_space
        assert tokenizer.decode(encoded.ids) == "hello hello"


def test_gemma_joins_in_the_order_of_its_vocabulary_and_spells_spaces_plainly():
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "bc", "ab", "  "]
    metadata = sentencepiece_metadata(
        **{
            "general.architecture": "gemma2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -5.0, -1.0, -2.0],
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 1],
        }
    )
    assert build_gguf_tokenizer(metadata).encode("abc  a", add_special_tokens=False).tokens == ["a", "bc", "▁▁", "a"]


def bos_and_eos(tokenizer: Any) -> tuple[bool, bool]:
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    return ids[0] == 1, ids[-1] == 2


def test_bos_and_eos_are_added_as_the_file_says_else_as_the_family_does(byte_level_metadata: dict[str, Any]):
    add_bos, add_eos = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
    unsaid = {key: value for key, value in byte_level_metadata.items() if key != add_bos}
    llama3 = {**unsaid, "tokenizer.ggml.pre": "llama-bpe"}
    assert bos_and_eos(build_gguf_tokenizer(sentencepiece_metadata())) == (True, False)
    assert bos_and_eos(build_gguf_tokenizer(sentencepiece_metadata(**{add_bos: False, add_eos: True}))) == (False, True)
    assert bos_and_eos(build_gguf_tokenizer(unsaid)) == (False, False)
    assert bos_and_eos(build_gguf_tokenizer(llama3)) == (True, False)
    assert bos_and_eos(build_gguf_tokenizer({**llama3, add_bos: False})) == (False, False)


def test_user_defined_tokens_are_whole_but_not_special():
    added = build_gguf_tokenizer(sentencepiece_metadata()).get_added_tokens_decoder()
    assert {token.content: token.special for token in added.values()} == {
        "<unk>": True,
        "<s>": True,
        "</s>": True,
        "<tool>": False,
    }


def test_special_tokens_are_named_for_templates():
    assert gguf_special_tokens(sentencepiece_metadata()) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "rwkv.*gpt2, llama"),
        ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "new"},
            "new.*smollm",
        ),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a zebra"]}, "damaged"),
    ],
)
def test_what_is_missing_or_not_supported_is_named(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        build_gguf_tokenizer(sentencepiece_metadata(**changes))
