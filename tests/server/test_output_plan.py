"""Grammars that tools, formats and reasoning make together: which texts are ways through them."""

from typing import Any

import numpy as np
import pytest

from radixserve.engine.constraint import mask_words
from radixserve.engine.errors import InvalidRequest
from radixserve.engine.grammars import XGrammars
from radixserve.engine.text.tokenizer import Tokenizer
from radixserve.server.output.deltas import Reasoning
from radixserve.server.output.formats import CALL_FORMATS, REASONING_FORMATS, OutputFormats
from radixserve.server.output.plan import OutputPlan, chat_plan
from radixserve.server.protocol.chat import ChatRequest
from radixserve.tests.server.byte_model import byte_tokenizer

EOS, VOCAB = 256, 262
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ANSWER = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def source() -> XGrammars:
    return XGrammars(lambda: Tokenizer(byte_tokenizer(), {}), VOCAB, (EOS,))


def plan(family: str = "hermes", reasoning: str | None = None, prompt_end: str = "", **fields: Any) -> OutputPlan:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})
    marks: Any = REASONING_FORMATS
    calls: Any = CALL_FORMATS
    found = OutputFormats(marks[reasoning] if reasoning else None, calls[family])
    return chat_plan(request, found, prompt_end, ("[THINK]", "[/THINK]"))


def fits(source: XGrammars, found: OutputPlan, text: str) -> bool:
    """Whether ``text``, then the end, is a way through the grammar; the parser then finds no calls in the content."""
    assert found.grammar is not None
    constraint, words = source.compile(found.grammar), np.zeros(mask_words(VOCAB), np.int32)
    for token in [*text.encode(), EOS]:
        constraint.fill_mask(words)
        if not words[token // 32] >> (token % 32) & 1:
            return False
        ended = constraint.accept(token)
    return ended


def test_requests_that_want_nothing_special_have_no_grammar_and_no_parser() -> None:
    assert plan() == plan(tools=TOOLS, tool_choice="none")
    assert plan().grammar is None and plan().new_parser() is None
    assert plan(tools=TOOLS).grammar is None and plan(tools=TOOLS).new_parser() is not None


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral", "qwen3_coder"])
def test_required_calls_are_sound_and_can_be_read(source: XGrammars, family: str) -> None:
    texts = {
        "hermes": f"{WEATHER}\n{NOW}",
        "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "</function>\n</tool_call>",
    }
    text = texts.get(family, '[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "now", "arguments": {}}]')
    found = plan(family, tools=TOOLS, tool_choice="required")
    assert fits(source, found, text)
    assert not fits(source, found, "It is sunny.") and not fits(source, found, "")
    assert not fits(source, found, text.replace("Oslo", "Paris"))
    assert not fits(source, found, text.replace("weather", "nothing"))
    run = found.new_parser()
    assert run is not None
    run.feed(text)
    run.finish()
    assert run.num_calls == (1 if family == "qwen3_coder" else 2)


def test_a_named_tool_is_called_once(source: XGrammars) -> None:
    found = plan(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert fits(source, found, NOW)
    assert not fits(source, found, WEATHER) and not fits(source, found, f"{NOW}\n{NOW}")
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    several = plan(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert fits(source, several, f"{NOW}\n{NOW}") and not fits(source, several, WEATHER)
    single = plan(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert fits(source, single, WEATHER) and not fits(source, single, f"{WEATHER}\n{NOW}")


def test_strict_tools_are_called_soundly_or_not_at_all(source: XGrammars) -> None:
    strict = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
    found = plan(tools=strict)
    assert fits(source, found, "Sunny, I guess.") and fits(source, found, f"Let me see. {WEATHER} Done.")
    assert not fits(source, found, WEATHER.replace("Oslo", "Paris"))
    assert plan("llama3_json", tools=strict).grammar is None, "its calls begin with a control token"


def test_a_format_leaves_the_choice_between_the_answer_and_calls(source: XGrammars) -> None:
    found = plan(tools=TOOLS, response_format=ANSWER)
    assert fits(source, found, '"yes"') and fits(source, found, WEATHER)
    assert not fits(source, found, "yes")
    assert found.field == "response_format"


def test_schemas_that_cannot_be_kept_matter_for_strict_tools_only(source: XGrammars) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    loose = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    assert fits(source, plan(tools=loose, tool_choice="required"), NOW.replace("{}", '{"b": 1}'))
    strict = [{"type": "function", "function": {"name": "now", "parameters": parameters, "strict": True}}]
    with pytest.raises(InvalidRequest, match="not: is not supported"):
        plan(tools=strict, tool_choice="required")


def test_formats_begin_after_the_reasoning(source: XGrammars) -> None:
    may_think = plan(reasoning="qwen3", response_format=ANSWER)
    assert fits(source, may_think, '<think>Hm, "no"?</think>\n\n"yes"') and fits(source, may_think, '"yes"')
    assert not fits(source, may_think, "<think>Hm</think>no")
    thinks = plan(reasoning="qwen3", prompt_end="assistant\n<think>\n", response_format=ANSWER)
    parser = thinks.new_parser()
    assert parser is not None and parser.feed("Hm.") == [Reasoning("Hm.")]
    assert fits(source, thinks, 'Hm.</think>"yes"') and not fits(source, thinks, '"yes"')
    thought = plan(reasoning="qwen3", prompt_end="<think>\n\n</think>\n\n", response_format=ANSWER)
    assert fits(source, thought, '"yes"') and not fits(source, thought, '<think>Hm</think>"yes"')
    assert thought.new_parser() is None


def test_a_budget_closes_the_reasoning(source: XGrammars) -> None:
    found = plan(reasoning="qwen3", thinking_token_budget=4)
    assert fits(source, found, "<think>1234</think>\n\nThe answer.")
    for cut in range(5):  # within the end of the reasoning, which may have begun in vain before
        assert fits(source, found, f"<think>{'</think'[:cut]}</think>Yes")
        assert fits(source, found, f"<think>{'1234'[cut:]}</think>Yes")
    assert not fits(source, found, "<think></thi</think>")
    assert not fits(source, found, "<think>12345</think>") and fits(source, found, "The answer, at once.")
    none = plan(reasoning="qwen3", thinking_token_budget=0, prompt_end="<think>\n", response_format=ANSWER)
    assert fits(source, none, '</think>"yes"') and not fits(source, none, 'x</think>"yes"')
    with pytest.raises(InvalidRequest, match="control tokens"):
        plan(reasoning="mistral", thinking_token_budget=4)
    assert plan(thinking_token_budget=4).grammar is None, "this model does not reason"
