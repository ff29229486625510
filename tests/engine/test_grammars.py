"""What xgrammar is used for: masks that follow the output, and errors that say what is wrong."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixserve.engine import compiling, grammars
from radixserve.engine.constraint import ConstraintFailed, TokenConstraint, mask_words
from radixserve.engine.errors import InvalidRequest, ModelError
from radixserve.engine.grammars import XGrammars
from radixserve.engine.structured import ebnf, json_schema, regex, structural_tag
from radixserve.engine.text.tokenizer import Tokenizer
from radixserve.tests.server.byte_model import byte_tokenizer

EOS, VOCAB = 256, 262


@pytest.fixture(scope="module")
def source() -> XGrammars:
    return XGrammars(lambda: Tokenizer(byte_tokenizer(), {}), VOCAB, (EOS,))


def allowed(constraint: TokenConstraint) -> set[int]:
    words = np.zeros(mask_words(VOCAB), np.int32)
    constraint.fill_mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def walk(constraint: TokenConstraint, text: str, choose: Callable[[set[int]], None] = lambda tokens: None) -> bool:
    """Whether ``text``, then the end, is a way through the grammar."""
    for token in [*text.encode(), EOS]:
        tokens = allowed(constraint)
        choose(tokens)
        if token not in tokens:
            return False
        ended = constraint.accept(token)
    return ended


def test_masks_allow_what_fits_and_the_end_only_at_the_end(source: XGrammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert walk(source.compile(structural_tag(json_schema(schema))), '{"a": 12}')
    assert not walk(source.compile(structural_tag(json_schema(schema))), '{"a": "x"}')
    assert not walk(source.compile(structural_tag(json_schema(schema))), '{"a": 12')


def test_control_tokens_and_padding_of_the_vocabulary_are_never_text(source: XGrammars) -> None:
    constraint = source.compile(structural_tag({"type": "any_text"}))
    assert {ord("a"), EOS} <= allowed(constraint)
    assert max(allowed(constraint)) == EOS


def test_what_was_compiled_is_cached_and_requests_do_not_share_their_place(source: XGrammars) -> None:
    grammar = structural_tag(regex("ab"))
    assert source.cached(grammar) is None
    first, second = source.compile(grammar), source.cached(grammar)
    assert second is not None
    first.accept(ord("a"))
    assert (allowed(first), allowed(second)) == ({ord("b")}, {ord("a")})
    with pytest.raises(ConstraintFailed, match="does not fit"):
        second.accept(ord("b"))


@pytest.mark.parametrize(
    "limits",
    [
        {"maxLength": 5},
        {"minLength": 2},
        {"type": ["string", "null"], "maxLength": 300},
        {"pattern": "^[^é]$"},
        {"pattern": "^é?.{1,20000}$"},
        {"pattern": r"^é?[\W\S]*$"},
        {"pattern": r"^é?\s$"},
        {"pattern": r"^é?[\t !-\]]+$"},
    ],
)
def test_strings_have_no_character_that_json_must_escape(source: XGrammars, limits: Any) -> None:
    constraint = source.compile(structural_tag(json_schema({"properties": {"a": limits}, "required": ["a"]})))
    for char in b'{"a":"':
        constraint.accept(char)
    assert ord(" ") in allowed(constraint)
    assert not {*range(32), ord("\\")} & allowed(constraint)
    constraint.accept(ord(" "))
    if ord('"') in allowed(constraint):  # the end of the string, not a part of it
        constraint.accept(ord('"'))
        assert ord("}") in allowed(constraint) and ord('"') not in allowed(constraint)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"type": "regex", "pattern": "a("}, "parenthesis"),
        ({"type": "regex", "pattern": "a(?=b)"}, "Lookahead"),
        ({"type": "grammar", "grammar": "root ::= other"}, "other"),
        ({"type": "json_schema", "json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"type": "no_such_format"}, "format"),
        ({"type": "grammar", "grammar": "root ::= root"}, "cannot be kept: no token"),
        ({"type": "grammar", "grammar": 'root ::= "ab" x\nx ::= x "c"'}, "cannot be kept: no token"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(source: XGrammars, form: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        source.compile(structural_tag(form))
    assert refused.value.param == "grammar"
    assert ".cc" not in refused.value.message, "no files of a library"


def test_the_least_recently_used_grammars_leave_the_cache(source: XGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "CACHE_BYTES", 1)
    one, other = structural_tag(regex("one")), structural_tag(regex("other"))
    source.compile(one)
    source.compile(other)
    assert source.cached(one) is None and source.cached(other) is not None


def test_slow_masks_are_refused_before_or_end_their_request(source: XGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = source.compile(structural_tag(regex("[a-z]{1,200}")))
    monkeypatch.setattr(grammars, "_MAX_MASK_S", 0.0)
    monkeypatch.setattr(grammars, "_MAX_MASKS_S", 0.0)
    with pytest.raises(ConstraintFailed, match="too long"):
        allowed(constraint)
    monkeypatch.setattr(compiling, "_MAX_TRIAL_S", 0.0)
    monkeypatch.setattr(grammars, "_MAX_MASKS_S", 1.0)
    with pytest.raises(InvalidRequest, match="too long"):
        source.compile(structural_tag(regex("[a-z]{1,201}")))


def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    def none() -> Tokenizer:
        raise ModelError("no tokenizer here")

    with pytest.raises(InvalidRequest, match="no tokenizer"):
        XGrammars(none, VOCAB, (EOS,)).compile(json.dumps({}))


def forced(source: XGrammars, form: dict[str, Any], begin: str = "") -> str:
    """What must come after ``begin``, in the one-byte tokens of this vocabulary."""
    constraint = source.compile(structural_tag(form))
    for token in begin.encode():
        constraint.accept(token)
    before = allowed(constraint)
    token_ids = constraint.forced()
    assert allowed(constraint) == before, "it has taken nothing"
    for token in token_ids:
        assert not constraint.accept(token)
    return bytes(token_ids).decode()


@pytest.mark.parametrize(
    ("form", "begin", "expected"),
    [
        (regex("the (cat|cow|dog)"), "", "the "),
        (regex("the (cat|cow|dog)"), "the c", ""),
        (regex("the (cat|cow|dog)"), "the d", "og"),
        (regex("(é|ê)!"), "", ""),  # a byte is forced, but no character
        (
            json_schema({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
            '{"',
            'city"',
        ),
        # A certain token is not the text that it stands for.
        ({"type": "or", "elements": [{"type": "token", "token": ord("a")}, ebnf('root ::= "abc"')]}, "", ""),
    ],
)
def test_what_is_forced_is_told_and_not_taken(source: XGrammars, form: Any, begin: str, expected: str) -> None:
    assert forced(source, form, begin) == expected


@pytest.mark.parametrize(
    "grammar", ['root ::= "a" root', 'root ::= [xy] more\nmore ::= "ab" more', 'root ::= "ab"{9999}']
)
def test_what_is_forced_without_an_end_is_left_to_the_masks(source: XGrammars, grammar: str) -> None:
    constraint = source.compile(structural_tag(ebnf(grammar)))
    for _ in range(3):
        assert constraint.forced() == []
        constraint.accept(min(allowed(constraint)))


def test_a_way_that_no_token_can_take_forces_nothing() -> None:
    """The tokens lack "b", which the grammar wants for ever after an "a", but beyond what is tried beforehand."""
    backend = byte_tokenizer()
    source = XGrammars(lambda: Tokenizer(backend, {}), ord("b"), ())
    constraint = source.compile(structural_tag(ebnf(f'root ::= "{"Z" * 30}a" more\nmore ::= "b" more')))
    assert constraint.forced() == []
