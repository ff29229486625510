"""How model families mark reasoning and tool calls, and which of them a model belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixserve.configs.schema import ReasoningParser, ServeConfig, ToolCallParser
from radixserve.engine.text.text_model import TextModel


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """``always``: the text begins inside, whether the prompt opened it or not."""

    start: str
    end: str
    always: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.end)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls stand behind one of ``starts``, up to one of ``ends`` if the family writes them; ``bare``: or the whole
    text is calls if it begins with one of these characters. ``arguments`` is the family's name for them."""

    body: Literal["json", "xml", "pythonic", "mistral"]
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: str = ""
    arguments: str = "arguments"
    short_ids: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        inside = ("[ARGS]", "[CALL_ID]") if self.body == "mistral" else ()
        return (*self.starts, *self.ends, *inside)


JSON_CALLS = CallFormat("json", bare="{[")

REASONING_FORMATS: dict[ReasoningParser, ReasoningFormat] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}
CALL_FORMATS: dict[ToolCallParser, CallFormat] = {
    "hermes": CallFormat("json", ("<tool_call>",), ("</tool_call>",)),
    "qwen3_coder": CallFormat("xml", ("<tool_call>",), ("</tool_call>",)),
    "llama3_json": CallFormat("json", ("<|python_tag|>",), bare="{", arguments="parameters"),
    "pythonic": CallFormat("pythonic", ("<|python_start|>",), ("<|python_end|>",), bare="["),
    "mistral": CallFormat("mistral", ("[TOOL_CALLS]",), short_ids=True),
    "phi": CallFormat("json", ("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
    "json": JSON_CALLS,
}


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """Of a served model; None where nothing is looked for."""

    reasoning: ReasoningFormat | None
    calls: CallFormat | None


# What a template tells the model to write; the first of these that it has.
_CALL_MARKS: dict[str, ToolCallParser] = {
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|tool_call|>": "phi",
    "functools": "phi",
    "func_name1(params_name1": "pythonic",
    "<|python_tag|>": "llama3_json",
    '"parameters": dictionary of argument name': "llama3_json",
}
_REASONING_MARKS: dict[str, ReasoningParser] = {"[THINK]": "mistral", "<seed:think>": "seed_oss", "</think>": "qwen3"}


def output_formats(text: TextModel, config: ServeConfig) -> OutputFormats:
    """What the flags say or, for "auto", what the chat template shows. One that says nothing of calls gets the system
    text of ``server/prompts.py``, which asks for those of hermes."""
    source = text.template.tool_source if text.template else ""
    calls, reasoning = config.tool_call_parser, config.reasoning_parser
    if calls == "auto":
        calls = next((name for mark, name in _CALL_MARKS.items() if mark in source), "hermes")
    if reasoning == "auto":
        reasoning = next((name for mark, name in _REASONING_MARKS.items() if mark in source), "none")
    return OutputFormats(REASONING_FORMATS.get(reasoning), CALL_FORMATS.get(calls))
