import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from radixserve.engine.errors import ModelError
from radixserve.engine.text.text_model import TextModel
from radixserve.engine.text.tokenizer import Tokenizer, load_tokenizer, read_special_tokens

from .corpus import HARD, random_texts
from .small_tokenizers import byte_level_backend, sentencepiece_backend, word_piece_backend

TEXTS = HARD + random_texts(4000)


def test_ids_equal_the_oracle_s_on_varied_text(text_model: TextModel, oracle: Any):
    for text in TEXTS:
        assert text_model.encode_prompt(text) == oracle(text).input_ids, text


def test_ids_equal_transformers_where_its_pre_tokenizer_cannot_differ(
    text_model: TextModel, transformers_tokenizer: Any
):
    # Splitting digits off first shows only after two spaces, and where digits are not ASCII.
    alike = [text for text in TEXTS if not re.search(r"\s\s+[0-9]|\n[0-9]|(?![0-9])[\d²³½①Ⅳ]", text)]
    assert len(alike) > 3000
    for text in alike:
        assert text_model.encode_prompt(text) == transformers_tokenizer(text).input_ids, text


def test_decoding_equals_the_oracle_s(text_model: TextModel, oracle: Any):
    for text in TEXTS[:1500]:
        ids = text_model.encode_prompt(text)
        for skip in (True, False):
            expected = oracle.backend_tokenizer.decode(ids, skip_special_tokens=skip)
            assert text_model.tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_text_survives_a_round_trip(text_model: TextModel):
    for text in TEXTS:
        ids = text_model.encode_prompt(text)
        assert text_model.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_control_text_in_a_raw_prompt_is_control_tokens(text_model: TextModel):
    assert text_model.encode_prompt("<|im_end|>" * 20) == [2] * 20


def test_token_bytes_joined_are_the_text(text_model: TextModel):
    text = "Příliš 🙂 žluťoučký\n日本語"
    joined = b"".join(text_model.tokenizer.token_bytes(i) for i in text_model.encode_prompt(text))
    assert joined.decode() == text


def test_tokens_and_ids_map_both_ways(text_model: TextModel):
    tokenizer = text_model.tokenizer
    assert tokenizer.token(2) == "<|im_end|>" and tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token(10**6) is None and tokenizer.token_id("no such token") is None
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.vocab_size == 49152
    assert tokenizer.decode([10**6, 2], skip_special_tokens=True) == ""


def test_the_lower_bound_of_tokens_is_one(text_model: TextModel):
    others = [
        Tokenizer(backend, {}) for backend in (byte_level_backend(), sentencepiece_backend(), word_piece_backend())
    ]
    for tokenizer in (text_model.tokenizer, *others):
        for text in TEXTS:
            assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert text_model.tokenizer.fewest_tokens("x" * 10**6) > 10_000


def test_threads_get_the_same_ids(text_model: TextModel):
    expected = [text_model.encode_prompt(text) for text in TEXTS[:300]]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(text_model.encode_prompt, TEXTS[:300])) == expected


def test_a_broken_tokenizer_file_is_a_model_error(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(tmp_path: Path):
    backend = sentencepiece_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=32)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(load_tokenizer(tmp_path / "tokenizer.json"), {})
    assert tokenizer.encode("hello, a b", add_special_tokens=True) == sentencepiece_backend().encode("hello, a b").ids


def test_special_tokens_may_be_text_or_objects(tmp_path: Path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null}')
    assert read_special_tokens(path) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert read_special_tokens(None) == {}


def test_the_text_side_loads_neither_torch_nor_transformers():
    code = "import sys, radixserve.engine.text.text_model; assert not {'torch', 'transformers'} & sys.modules.keys()"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
