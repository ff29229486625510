"""Generated text taken apart: each family's transcripts, cut at every place and fed character by character."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixserve.configs.schema import ServeConfig
from radixserve.server.output import formats
from radixserve.server.output.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from radixserve.server.output.formats import CallFormat
from radixserve.server.output.parser import OutputParser

TOOLS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "parts": {"type": "array"}}},
    "now": {},
}
OSLO = {"city": "Oslo", "days": 3}
CALLS: dict[Any, CallFormat] = formats.CALL_FORMATS
THINK = formats.REASONING_FORMATS["qwen3"]
Said = tuple[str, str, list[tuple[str, Any]]]  # reasoning, content, calls


def parser(family: str | None, **options: Any) -> OutputParser:
    return OutputParser(THINK, CALLS[family] if family else None, TOOLS, **options)


def feed(run: OutputParser, *pieces: str, cut: bool = False) -> list[Delta]:
    return [*(delta for piece in pieces for delta in run.feed(piece)), *run.finish(cut=cut)]


def said(deltas: list[Delta]) -> Said:
    """All deltas put together, as a client does; each call begins once, with a new id, before its arguments."""
    reasoning = "".join(d.text for d in deltas if isinstance(d, Reasoning))
    content = "".join(d.text for d in deltas if isinstance(d, Content))
    starts = [d for d in deltas if isinstance(d, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.id for start in starts}) == len(starts)
    calls = []
    for start in starts:
        arguments = [d for d in deltas if isinstance(d, CallArguments) and d.index == start.index]
        assert all(deltas.index(start) < deltas.index(d) for d in arguments)
        text = "".join(d.text for d in arguments)
        try:
            calls.append((start.name, json.loads(text)))
        except ValueError:
            calls.append((start.name, text))
    return reasoning, content, calls


TRANSCRIPTS: list[tuple[str | None, str, Said]] = [
    (None, "Hello there. \n", ("", "Hello there. \n", [])),
    (None, "  <think>\nLet me see.\n</think>\n\n Yes.\n", ("Let me see.", "Yes.\n", [])),
    (None, "<think></think>\n\nYes", ("", "Yes", [])),
    (None, "<think>endless, a < b </thin", ("endless, a < b </thin", "", [])),
    (None, "<thinking> is no tag", ("", "<thinking> is no tag", [])),
    (None, "a <think>b</think>", ("", "a <think>b</think>", [])),
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        ("", "", [("weather", OSLO)]),
    ),
    (
        "hermes",
        '<think>hm</think>\nI look.\n<tool_call>{"name":"now","arguments":{}}</tool_call>\n'
        '<tool_call>{"arguments": {"city": "}\\"{"}, "name": "weather"}</tool_call> Done.',
        ("hm", "I look.Done.", [("now", {}), ("weather", {"city": '}"{'})]),
    ),
    (
        "hermes",
        '<tool_call>[{"name": "now"}, {"name": "weather", "arguments": "{\\"days\\": 2}"}]</tool_call>',
        ("", "", [("now", {}), ("weather", {"days": 2})]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        ("", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    ),
    ("hermes", "<tool_call>no json</tool_call> so", ("", "<tool_call>no json</tool_call> so", [])),
    ("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', ("", "<tool_call>", [("now", {})])),
    ("hermes", "a < b <tool_cal", ("", "a < b <tool_cal", [])),
    ("hermes", '<tool_call>{"name": "weather", "argu', ("", '<tool_call>{"name": "weather", "argu', [])),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os', ("", "", [("weather", '{"city": "Os')])),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": [1]}',
        ("", '<tool_call>{"name": "weather", "arguments": [1]}', []),
    ),
    (
        "qwen3_coder",
        "On it.\n\n<tool_call>\n<function=weather>\n<parameter=city>"
        '\nNew "York"\n\n2\n</parameter>\n<parameter=days>\n3\n'
        '</parameter>\n<parameter=parts>\n["a", 1]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ("", "On it.", [("weather", {"city": 'New "York"\n\n2', "days": 3, "parts": ["a", 1]}), ("now", {})]),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=other>\n</function></tool_call>",
        ("", "<tool_call>\n<function=other>\n</function></tool_call>", []),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=days>soon</parameter></function></tool_call>",
        ("", "", [("weather", {"days": "soon"})]),
    ),
    ("llama3_json", ' {"name": "weather", "parameters": {"city": "Oslo", "days": 3}}', ("", "", [("weather", OSLO)])),
    (
        "llama3_json",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"days": 1}}',
        ("", "", [("now", {}), ("weather", {"days": 1})]),
    ),
    ("llama3_json", '{"answer": 42}', ("", '{"answer": 42}', [])),
    ("llama3_json", 'It is {"name": "now"}', ("", 'It is {"name": "now"}', [])),
    (
        "pythonic",
        "[weather(city='O(s)lo', days=3), now()]",
        ("", "", [("weather", {"city": "O(s)lo", "days": 3}), ("now", {})]),
    ),
    (
        "pythonic",
        "<|python_start|>[weather(parts=[1, {'a': None}])]<|python_end|>",
        ("", "", [("weather", {"parts": [1, {"a": None}]})]),
    ),
    ("pythonic", "[1, 2] are numbers (both)", ("", "[1, 2] are numbers (both)", [])),
    ("pythonic", "[<|python_start|>[now()]<|python_end|>", ("", "[", [("now", {})])),
    ("pythonic", "[weather(open('x'))]", ("", "[weather(open('x'))]", [])),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, {"name": "now", "arguments": {}}]',
        ("", "", [("weather", OSLO), ("now", {})]),
    ),
    (
        "mistral",
        'Sure.[TOOL_CALLS]weather[ARGS]{"days": 1}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{}',
        ("", "Sure.", [("weather", {"days": 1}), ("now", {})]),
    ),
    ("mistral", 'x[TOOL_CALLS]other{"days": 1}', ("", 'x[TOOL_CALLS]other{"days": 1}', [])),
    ("mistral", "It has [TOOL_CALLS] twice.[TOOL_CALLS]now{}", ("", "It has [TOOL_CALLS] twice.", [("now", {})])),
    ("phi", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', ("", "", [("now", {})])),
    ("phi", 'functools[{"name": "weather", "arguments": {"days": 1}}]', ("", "", [("weather", {"days": 1})])),
    ("phi", "the functools module", ("", "the functools module", [])),
    (
        "json",
        '\n[{"name": "now", "arguments": {}}, {"name": "weather", "parameters": {"days": 1}}]',
        ("", "", [("now", {}), ("weather", {"days": 1})]),
    ),
    ("json", '[{"name": "now", "arguments": {}}, oops', ("", ", oops", [("now", {})])),
    ("json", '[{"name": "now", "arguments": null}]', ("", "", [("now", {})])),
]


@pytest.mark.parametrize(("family", "text", "expected"), TRANSCRIPTS)
def test_transcripts_say_the_same_however_they_are_cut(family: str | None, text: str, expected: Said) -> None:
    assert said(feed(parser(family), text)) == expected
    assert said(feed(parser(family), *text)) == expected, "character by character"
    for cut in range(1, len(text)):
        assert said(feed(parser(family), text[:cut], text[cut:])) == expected, f"cut at {cut}"


NOW = '<tool_call>{"name": "now", "arguments": {}}'
CUT_TRANSCRIPTS: list[tuple[str, str, Said]] = [
    ("hermes", "I look.\n<tool_c", ("", "I look.", [])),
    ("hermes", "I look.\n<tool_call>", ("", "I look.", [])),
    ("hermes", '<think>hm</think>\n<tool_call>\n{"name": "wea', ("hm", "", [])),
    ("hermes", '<tool_call>{"arguments": {"city": "Os', ("", "", [])),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os', ("", "", [("weather", '{"city": "Os')])),
    ("hermes", f'{NOW}</tool_call>\n<tool_call>{{"na', ("", "", [("now", {})])),
    ("hermes", f"{NOW}\n</tool_c", ("", "", [("now", {})])),
    ("hermes", NOW.removesuffix("}"), ("", "", [("now", {})])),
    ("hermes", "<tool_call>no json", ("", "<tool_call>no json", [])),
    ("hermes", "is a <b> so \n", ("", "is a <b> so \n", [])),
    ("qwen3_coder", "On it.\n<tool_call>\n<function=wea", ("", "On it.", [])),
    ("llama3_json", '<|python_tag|>{"name": "no', ("", "", [])),
    ("llama3_json", '{"name": "no', ("", '{"name": "no', [])),
    ("pythonic", "<|python_start|>[weather(city='O", ("", "", [])),
    ("pythonic", "[weather(city='O", ("", "[weather(city='O", [])),
    ("pythonic", "[now(), weather(ci", ("", "", [("now", {})])),
    ("mistral", "Sure.[TOOL_CALLS]weath", ("", "Sure.", [])),
    ("phi", 'I look. functools[{"na', ("", "I look.", [])),
    ("phi", "Python has func", ("", "Python has func", [])),
    ("phi", "Python has functools", ("", "Python has functools", [])),
    ("json", '[{"name": "no', ("", '[{"name": "no', [])),
    ("json", '[{"name": "now"}, {"na', ("", "", [("now", {})])),
]


@pytest.mark.parametrize(("family", "text", "expected"), CUT_TRANSCRIPTS)
def test_calls_cut_before_their_name_are_dropped(family: str, text: str, expected: Said) -> None:
    assert said(feed(parser(family), *text, cut=True)) == expected, "character by character"
    for middle in range(len(text)):
        assert said(feed(parser(family), text[:middle], text[middle:], cut=True)) == expected, f"fed up to {middle}"


def test_texts_that_end_by_themselves_keep_calls_that_are_not_whole() -> None:
    for text in ("I look.\n<tool_c", 'I look.\n<tool_call>{"name": "wea'):
        assert said(feed(parser("hermes"), text)) == ("", text, [])


def test_every_family_has_transcripts() -> None:
    assert {family for family, _, _ in TRANSCRIPTS} == {None, *CALLS}


def test_arguments_and_reasoning_grow_as_they_come() -> None:
    run = parser("hermes")
    assert run.feed("<think>Well") == [Reasoning("Well")]
    assert run.in_reasoning
    assert run.feed(" now</think>\n\nI ") == [Reasoning(" now"), Content("I")]
    assert run.feed('<tool_call>{"name": "weather", "arguments": ') == [], "they may be anything yet"
    start, arguments = run.feed('{"city": "Os')
    assert isinstance(start, CallStart) and (start.index, start.name, run.num_calls) == (0, "weather", 1)
    assert arguments == CallArguments(0, '{"city": "Os')
    assert run.feed('lo"}}</tool_call>') == [CallArguments(0, 'lo"}')]


def test_strings_of_xml_parameters_grow_as_they_come() -> None:
    run = parser("qwen3_coder")
    run.feed("<tool_call><function=weather><parameter=city>\nNew")
    assert run.feed(' "Y\n') == [CallArguments(0, ' \\"Y')]
    assert run.feed("ork") == [CallArguments(0, "\\nork")]


def test_text_in_brackets_is_not_held_back_for_a_call_that_never_comes() -> None:
    run = parser("pythonic")
    assert run.feed("[1") == []
    assert run.feed(", 2] are") == [Content("[1, 2] are")]


def test_prompt_that_ends_inside_reasoning_needs_no_tag() -> None:
    assert said(feed(parser(None, thinking=True), "So.</think>Yes")) == ("So.", "Yes", [])
    assert said(feed(parser(None, thinking=True), "<think>So.</think>Yes")) == ("So.", "Yes", [])
    opened = parser(None, thinking=True)
    assert opened.in_reasoning and opened.feed("\n") == [] and opened.in_reasoning, "every token counts"
    always = OutputParser(formats.REASONING_FORMATS["deepseek_r1"], None, {})
    assert said(feed(always, "So.</think>Yes")) == ("So.", "Yes", [])


def test_only_the_first_call_is_told_where_one_is_allowed() -> None:
    text = '[{"name": "now"}, {"name": "weather", "arguments": {"days": 1}}]'
    assert said(feed(parser("json", single_call=True), *text)) == ("", "", [("now", {})])


@pytest.mark.parametrize("argument", ["-" * 200_000 + "1", "[" * 90_000, "1e999", "+".join("1" * 50_000)])
def test_python_that_is_made_to_break_its_reader_is_text(argument: str) -> None:
    text = f"[weather(days={argument})]"
    assert said(feed(parser("pythonic"), text)) == ("", text, [])


def test_ids_of_mistral_have_nine_letters_and_digits() -> None:
    start = next(d for d in feed(parser("mistral"), "[TOOL_CALLS]now{}") if isinstance(d, CallStart))
    assert len(start.id) == 9 and start.id.isalnum()


@given(
    st.sampled_from(sorted(CALLS)),
    st.lists(
        st.sampled_from(
            [
                *"[]{}()<>\"\\,:;= \n'xn",
                "<tool_call>",
                "</tool_call>",
                "<function=now>",
                "<parameter=",
                "</parameter>",
                "</function>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "now",
                '"name"',
                '"now"',
                '"arguments"',
                "functools",
                "<think>",
                "</think>",
                "<|python_tag|>",
            ]
        )
    ),
    st.data(),
)
def test_any_text_at_all_is_taken_apart_alike_and_without_an_error(
    family: str, pieces: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    whole = said(feed(parser(family), text))
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=4))})
    assert said(feed(parser(family), *(text[a:b] for a, b in pairwise(cuts)))) == whole


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ messages }}", "hermes", None),
        ("<tool_call></tool_call> {{ tools }} </think>", "hermes", "qwen3"),
        ("<tool_call><function=x> {{ tools }}", "qwen3_coder", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|tool_call|>", "phi", None),
        ("<|python_tag|>", "llama3_json", None),
        ("[func_name1(params_name1=params_value1)]", "pythonic", None),
    ],
)
def test_families_are_known_by_their_templates(template: str, calls: str, reasoning: str | None) -> None:
    from radixserve.engine.text.chat_template import ChatTemplate

    class Text:
        pass

    text: Any = Text()
    text.template = ChatTemplate(template, {}, origin="here")
    found = formats.output_formats(text, ServeConfig())
    assert found.calls is CALLS[calls]
    assert found.reasoning is (formats.REASONING_FORMATS[reasoning] if reasoning else None)
    assert text.template.uses_tools == ("tools }}" in template)
    none = formats.output_formats(text, ServeConfig(tool_call_parser="none", reasoning_parser="deepseek_r1"))
    assert none.calls is None and none.reasoning is not None and none.reasoning.always
