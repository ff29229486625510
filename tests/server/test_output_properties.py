"""Answers written as the families write them, taken apart in pieces of any size, and cut off anywhere."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.engine.messages import FinishReason, TokenEvent
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.text.tokenizer import Tokenizer
from radixserve.server.choice import Choice, Prompt
from radixserve.server.output import formats
from radixserve.server.output.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from radixserve.server.output.formats import CallFormat, ReasoningFormat
from radixserve.server.output.parser import OutputParser
from radixserve.tests.server.byte_model import byte_tokenizer

REASONING: dict[Any, ReasoningFormat] = formats.REASONING_FORMATS
CALLS: dict[Any, CallFormat] = formats.CALL_FORMATS
TOOLS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "parts": {"type": "array"}}},
    "now": {},
}
MARKERS = sorted({m for form in (*REASONING.values(), *CALLS.values()) for m in form.markers})
Call = tuple[str, dict[str, Any]]


@dataclass
class Said:
    """What a client puts together of the deltas; arguments as they were written."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def said(deltas: list[Delta]) -> Said:
    """Also checks that calls come one after the other, each with one name and an id of its own at its beginning."""
    found, ids = Said(), set()
    for delta in deltas:
        match delta:
            case Reasoning(text):
                assert text and not found.content and not found.calls, "reasoning comes first"
                found.reasoning += text
            case Content(text):
                assert text
                found.content += text
            case CallStart(index, call_id, name):
                assert (index, call_id in ids) == (len(found.calls), False)
                ids.add(call_id)
                found.calls.append((name, ""))
            case CallArguments(index, text):
                assert text and index == len(found.calls) - 1
                name, arguments = found.calls[-1]
                found.calls[-1] = name, arguments + text
    return found


def fed(run: OutputParser, pieces: list[str], *, cut: bool = False) -> Said:
    return said([*(delta for piece in pieces for delta in run.feed(piece)), *run.finish(cut=cut)])


def pieces_of(text: str, rng: random.Random) -> list[str]:
    """Characters, or random pieces."""
    if rng.random() < 0.3:
        return list(text)
    cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))})
    return [text[a:b] for a, b in pairwise(cuts)]


# ---- how the families write ----


def _json_list(calls: list[Call], key: str = "arguments") -> str:
    return json.dumps([{"name": name, key: arguments} for name, arguments in calls], ensure_ascii=False)


def _each(calls: list[Call], key: str, between: str, wrap: str = "{}") -> str:
    written = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    return between.join(wrap.replace("{}", text) for text in written)


def _xml(calls: list[Call]) -> str:
    def value(of: Any) -> str:
        return of if isinstance(of, str) else json.dumps(of)

    def one(name: str, arguments: dict[str, Any]) -> str:
        parts = "".join(f"<parameter={key}>\n{value(of)}\n</parameter>\n" for key, of in arguments.items())
        return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _python(calls: list[Call]) -> str:
    return "[" + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in calls) + "]"


Writer = Callable[[list[Call]], str]
# The second ones begin without a marker, so that nothing can stand before them.
WRITERS: list[tuple[str, bool, Writer]] = [
    ("hermes", False, lambda calls: _each(calls, "arguments", "\n", "<tool_call>\n{}\n</tool_call>")),
    ("qwen3_coder", False, _xml),
    ("llama3_json", False, lambda calls: "<|python_tag|>" + _each(calls, "parameters", "; ")),
    ("llama3_json", True, lambda calls: _each(calls, "parameters", "; ")),
    ("pythonic", False, lambda calls: f"<|python_start|>{_python(calls)}<|python_end|>"),
    ("pythonic", True, _python),
    ("mistral", False, lambda calls: "[TOOL_CALLS]" + _json_list(calls)),
    ("mistral", False, lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(args)}" for n, args in calls)),
    ("phi", False, lambda calls: f"<|tool_call|>{_json_list(calls)}<|/tool_call|>"),
    ("phi", False, lambda calls: "functools" + _json_list(calls)),
    ("json", True, _json_list),
]


# ---- what they write ----

# Beginnings of markers, and what white space and Unicode can do to a reader.
_BITS = [*"ab \n\t<>[]{}()\"'\\,:;=|/#", "é", "漢", "🙂", "\u2028", "\x00", *(m[:-1] for m in MARKERS), "<think", "</t"]


def _no_marker(text: str) -> bool:
    return not any(marker in text for marker in (*MARKERS, "<parameter=", "</parameter>", "</function>"))


_text = st.lists(st.sampled_from(_BITS), max_size=8).map("".join).filter(_no_marker)
_arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": _text.map(lambda text: text.replace("\x00", "")),
        "days": st.integers(),
        "parts": st.lists(
            st.one_of(_text.map(lambda text: text.replace("\x00", "")), st.booleans(), st.none()), max_size=3
        ),
    },
)


@dataclass
class Answer:
    text: str
    reasoning: str
    before: str  # the content as it stands in the text, in front of the calls
    calls: list[Call]
    bare: bool
    make: Callable[[], OutputParser]


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    family, bare, write = draw(st.sampled_from(WRITERS))
    marks = draw(st.sampled_from([None, *REASONING.values()]))
    thinking = marks is not None and (marks.always or draw(st.booleans()))
    calls = [
        (name, args if name == "weather" else {})
        for name, args in draw(st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), _arguments), max_size=3))
    ]
    before = "" if bare and calls else draw(_text)
    reasoning, opened = "", ""
    if marks is not None:
        reasoning = draw(_text)
        opened = ("" if thinking and draw(st.booleans()) else marks.start) + reasoning + marks.end
    form = CALLS[family]
    if form.bare and before.lstrip(" \t\r\n").startswith(tuple(form.bare)) and (not calls or '"' in before):
        before = "x" + before  # else it is the beginning of a call, up to the end of a string
    text = opened + before + (write(calls) if calls else "")
    return Answer(text, reasoning, before, calls, bare, lambda: OutputParser(marks, form, TOOLS, thinking=thinking))


@settings(max_examples=100)
@given(answers(), st.randoms(use_true_random=False))
def test_what_was_written_is_what_is_said_in_any_pieces(answer: Answer, rng: random.Random) -> None:
    whole = fed(answer.make(), [answer.text])
    assert whole.reasoning == answer.reasoning.strip()
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == answer.calls
    assert whole.content.strip() == answer.before.strip()
    for _ in range(3):
        assert fed(answer.make(), pieces_of(answer.text, rng)) == whole


@settings(max_examples=100)
@given(answers(), st.randoms(use_true_random=False))
def test_what_is_cut_anywhere_says_a_part_of_it_and_shows_no_marker(answer: Answer, rng: random.Random) -> None:
    whole = fed(answer.make(), [answer.text])
    for _ in range(8):
        text = answer.text[: rng.randrange(len(answer.text) + 1)]
        part = fed(answer.make(), pieces_of(text, rng), cut=True)
        assert part == fed(answer.make(), [text], cut=True)
        assert answer.reasoning.lstrip().startswith(part.reasoning), (text, part)
        if answer.bare and answer.calls and not part.calls:
            continue  # without a marker it stays text until its name is known
        shown = answer.before + "functools"  # the one marker that is a word, and stays text until a call begins
        assert shown.lstrip().startswith(part.content.lstrip()), (text, part)
        for (name, arguments), (full_name, full) in zip(part.calls, whole.calls, strict=False):
            assert name == full_name and full.startswith(arguments)


_PARTS = [*_BITS, *MARKERS, "now", "weather", '{"name": "now"', '"arguments": {', "<function=now>", "<parameter=city>"]


@settings(max_examples=150)
@given(
    st.sampled_from([None, *REASONING.values()]),
    st.sampled_from([None, *CALLS.values()]),
    st.lists(st.sampled_from([*_PARTS, "</parameter>", "</function>", "now(", '"}', "}]"]), max_size=14),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_garbage_is_taken_apart_alike_in_any_pieces(
    marks: ReasoningFormat | None, form: CallFormat | None, parts: list[str], thinking: bool, cut: bool, rng: Any
) -> None:
    text = "".join(parts)
    whole = fed(OutputParser(marks, form, TOOLS, thinking=thinking), [text], cut=cut)
    again = fed(OutputParser(marks, form, TOOLS, thinking=thinking), pieces_of(text, rng), cut=cut)
    assert again == whole
    single = fed(OutputParser(marks, form, TOOLS, thinking=thinking, single_call=True), list(text), cut=cut)
    assert single.calls == whole.calls[:1] and single.reasoning == whole.reasoning


@settings(max_examples=100)
@given(answers(), st.randoms(use_true_random=False))
def test_tokens_that_end_inside_a_character_are_read_as_text_is(answer: Answer, rng: random.Random) -> None:
    data = answer.text.encode()
    data = data[: rng.randrange(1, len(data) + 1)] if data else b"x"
    tokens = Tokenizer(byte_tokenizer(), {})
    prompt, sampling = Prompt(b"", 1), SamplingParams()
    choice = Choice(0, prompt, tokens.detokenizer(skip_special_tokens=True), None, sampling, parser=answer.make())
    deltas: list[Delta] = []
    for byte in data[:-1]:
        choice.on_token(byte)
        if rng.random() < 0.5:
            deltas += choice.take_deltas()
    choice.on_tokens(TokenEvent(0, [data[-1]], FinishReason.LENGTH))
    deltas += choice.take_deltas()
    assert said(deltas) == fed(answer.make(), [data.decode(errors="replace")], cut=True)
    assert choice.num_tokens == len(data) and choice.finish_reason == "length"


def test_every_family_is_written_here() -> None:
    assert {family for family, _, _ in WRITERS} == set(CALLS)


@pytest.mark.parametrize("name", sorted(REASONING))
def test_a_limit_within_the_markers_of_reasoning_shows_nothing_of_them(name: str) -> None:
    form = REASONING[name]
    for end in range(1, len(form.end)):
        assert fed(OutputParser(form, None, {}, thinking=True), [*"So.", *form.end[:end]], cut=True) == Said("So.")
    if not form.always:
        for end in range(1, len(form.start)):
            assert fed(OutputParser(form, None, {}), list(form.start[:end]), cut=True) == Said()
