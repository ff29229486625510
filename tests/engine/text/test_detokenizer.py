from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.engine.text.detokenizer import StopStringMatcher
from radixserve.engine.text.text_model import TextModel
from radixserve.engine.text.tokenizer import Tokenizer

from .corpus import HARD, random_texts
from .small_tokenizers import byte_level_backend, sentencepiece_backend, word_piece_backend

BYTE_LEVEL = Tokenizer(byte_level_backend(), {})
SENTENCEPIECE = Tokenizer(sentencepiece_backend(), {})
WORD_PIECE = Tokenizer(word_piece_backend(), {})

Pieces = Sequence[Sequence[int]]


def in_pieces(tokenizer: Tokenizer, pieces: Pieces, skip_special_tokens: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    return [*("".join(map(detokenizer.feed, piece)) for piece in pieces), detokenizer.finish()]


def ids_in_pieces(vocab_size: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, vocab_size + 2), max_size=4), max_size=12)


@given(ids_in_pieces(BYTE_LEVEL.vocab_size), st.booleans())
def test_byte_level_pieces_join_to_the_library_s_decoding(pieces: Pieces, skip: bool):
    expected = BYTE_LEVEL.backend.decode([i for piece in pieces for i in piece], skip_special_tokens=skip)
    assert "".join(in_pieces(BYTE_LEVEL, pieces, skip)) == expected


@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
def test_random_ids_of_the_default_model_join_to_the_library_s_decoding(
    text_model: TextModel, ids: list[int], skip: bool
):
    tokenizer = text_model.tokenizer
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(in_pieces(tokenizer, [[i] for i in ids], skip)) == expected


@given(ids_in_pieces(SENTENCEPIECE.vocab_size), st.booleans())
def test_sentencepiece_pieces_join_to_the_library_s_decoding(pieces: Pieces, skip: bool):
    ids = [i for piece in pieces for i in piece]
    expected = SENTENCEPIECE.backend.decode(ids, skip_special_tokens=skip)
    joined = "".join(in_pieces(SENTENCEPIECE, pieces, skip))
    if "\ufffd" not in expected:
        assert joined == expected
    # A run of bytes with one wrong byte is lost as a whole in the library; here the characters in it are kept.
    assert joined == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=20))
def test_sentencepiece_text_comes_back_token_by_token(text: str):
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    expected = SENTENCEPIECE.backend.decode(ids, skip_special_tokens=False)
    assert "".join(in_pieces(SENTENCEPIECE, [[i] for i in ids], False)) == expected


@given(st.lists(st.integers(0, 10), max_size=12))
def test_other_decoders_join_to_the_library_s_decoding(ids: list[int]):
    expected = WORD_PIECE.backend.decode(ids, skip_special_tokens=True)
    assert "".join(in_pieces(WORD_PIECE, [[i] for i in ids], True)) == expected


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_no_piece_holds_a_replacement_character_that_the_text_does_not_have(tokenizer: Tokenizer):
    for text in ("😀🎉🚀" * 3, "日本語", "नमस्ते ", "čřž한국어"):
        pieces = in_pieces(tokenizer, [[i] for i in tokenizer.encode(text, add_special_tokens=False)], True)
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte():
    ids = BYTE_LEVEL.encode("é🙂", add_special_tokens=False)
    assert in_pieces(BYTE_LEVEL, [[i] for i in ids], True) == ["", "é", "", "", "", "🙂", ""]


def test_an_incomplete_character_at_the_end_becomes_one_replacement_character():
    ids = BYTE_LEVEL.encode("a🙂", add_special_tokens=False)[:-1]
    assert in_pieces(BYTE_LEVEL, [ids], True) == ["a", "\ufffd"]


@pytest.mark.parametrize("text", [" Paris", "\n", "  ", "Paris", "\t"])
def test_no_space_is_trimmed_at_either_end(text_model: TextModel, text: str):
    ids = text_model.tokenizer.encode(text, add_special_tokens=False) * 4
    assert "".join(in_pieces(text_model.tokenizer, [[i] for i in ids], True)) == text * 4


def test_long_mixed_text_token_by_token(text_model: TextModel, oracle: Any):
    text = "".join(HARD + random_texts(300))
    ids = text_model.encode_prompt(text)
    pieces = in_pieces(text_model.tokenizer, [[i] for i in ids], True)
    assert "".join(pieces) == oracle.decode(ids, skip_special_tokens=True)


def cut(stops: Sequence[str], pieces: Sequence[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops, include_stop_str_in_output=include)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + matcher.finish(), matcher.matched


def first_complete(stops: Sequence[str], text: str) -> tuple[int, int, str | None]:
    """By definition: where the first stop string begins and ends, looking at one more character at a time."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), end, stop
    return len(text), len(text), None


few_letters = st.text("ab<", max_size=5)
stop_lists = st.lists(few_letters.filter(bool), min_size=1, max_size=4)


@given(stop_lists, st.lists(few_letters, max_size=10), st.booleans())
@settings(max_examples=1000)
def test_the_cut_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str], include: bool):
    text = "".join(pieces)
    start, end, stop = first_complete(stops, text)
    assert cut(stops, pieces, include) == (text[: end if include else start], stop)


@given(stop_lists, st.lists(few_letters, max_size=10))
@settings(max_examples=500)
def test_only_what_may_begin_a_stop_string_is_held_back(stops: list[str], pieces: list[str]):
    matcher = StopStringMatcher(stops)
    shown = so_far = ""
    for piece in pieces:
        so_far += piece
        shown += matcher.feed(piece)
        if matcher.matched:
            break
        lengths = [n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])]
        assert shown == so_far[: len(so_far) - max(lengths)]


def test_text_after_a_match_is_swallowed():
    matcher = StopStringMatcher(["END"])
    assert [matcher.feed(piece) for piece in ("one E", "ND two", "three")] == ["one ", "", ""]
    assert matcher.finish() == "" and matcher.matched == "END"


def test_an_unfinished_stop_string_is_released_at_the_end():
    assert cut(["\n\nUser:"], ["hello\n", "\nUse"]) == ("hello\n\nUse", None)


def test_without_stop_strings_everything_passes():
    assert cut([], ["a", "", "b"]) == ("ab", None)
