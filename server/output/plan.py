"""What the answer to one chat request is made to look like, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.structured import Format, json_schema
from radixserve.engine.text.conversation import wrong
from radixserve.server.output.formats import JSON_CALLS, CallFormat, OutputFormats, ReasoningFormat
from radixserve.server.output.parser import OutputParser
from radixserve.server.protocol.chat import ChatRequest
from radixserve.server.protocol.completions import CompletionRequest
from radixserve.server.protocol.structured import Wanted, grammar_text, wanted_format
from radixserve.server.protocol.tools import Function

# Calls in one answer, where calls are enforced: small models would never stop.
_MAX_CALLS = 16
_ANY_TEXT: Format = {"type": "any_text"}
# Between reasoning and what follows.
_BREAK: Format = {"type": "regex", "pattern": r"\n{0,2}"}


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """``grammar`` for the engine, asked for by ``field``. ``new_parser`` makes a parser for a choice, or None where the
    text is the content; ``markers`` are control tokens that it must see."""

    grammar: str | None = None
    field: str = "grammar"
    new_parser: Callable[[], OutputParser | None] = lambda: None
    markers: tuple[str, ...] = ()


def completion_plan(request: CompletionRequest) -> OutputPlan:
    """Raises ``InvalidRequest``."""
    return _plan(wanted_format(request))


def _plan(wanted: Wanted | None) -> OutputPlan:
    return OutputPlan(grammar_text(wanted.format, wanted.field), wanted.field) if wanted else OutputPlan()


def chat_plan(
    request: ChatRequest, formats: OutputFormats, prompt_end: str, control_texts: Sequence[str]
) -> OutputPlan:
    """``prompt_end``: the last characters of the prompt. Raises ``InvalidRequest``."""
    functions = request.callable_functions
    single = request.tool_choice.mode == "named" or request.parallel_tool_calls is False
    calls, wanted = _wanted(request, formats.calls, functions, single)
    reasoning, budget = formats.reasoning, request.thinking_token_budget
    prompt_end = prompt_end.rstrip()
    if reasoning is not None and not prompt_end.endswith(reasoning.end):
        wanted = _after_reasoning(wanted, reasoning, prompt_end, budget, control_texts)
    elif reasoning is not None:
        reasoning = None  # the prompt itself has closed it
    thinking = reasoning is not None and prompt_end.endswith(reasoning.start)
    if not request.separate_reasoning:
        reasoning = None
    markers = tuple(marker for form in (reasoning, calls) if form for marker in form.markers)
    plan = replace(_plan(wanted), markers=markers)
    if reasoning is None and not functions:
        return plan
    tools = {function.name: function.parameters or {} for function in functions}
    parser = partial(OutputParser, reasoning, calls, tools, thinking=thinking, single_call=single)
    return replace(plan, new_parser=parser)


def _wanted(
    request: ChatRequest, calls: CallFormat | None, functions: Sequence[Function], single: bool
) -> tuple[CallFormat | None, Wanted | None]:
    """What format and tools ask for together, and how calls are written then."""
    wanted = wanted_format(request)
    if not functions:
        return calls, wanted
    if request.tool_choice.mode in ("named", "required"):
        calls = _enforceable(calls)
        return calls, Wanted(_calls_format(calls, functions, single), "tools")
    if calls is None:
        return None, wanted
    if wanted is not None:
        calls = _enforceable(calls)
        either = {"type": "or", "elements": [wanted.format, _calls_format(calls, functions, single)]}
        return calls, Wanted(either, wanted.field)
    strict = _strict_format(calls, functions, single) if any(function.strict for function in functions) else None
    return calls, None if strict is None else Wanted(strict, "tools")


def _enforceable(calls: CallFormat | None) -> CallFormat:
    """A family's own form if it is plain text, else JSON: control tokens are no text to a grammar."""
    return calls if calls is not None and calls.starts == ("<tool_call>",) else JSON_CALLS


def _calls_format(calls: CallFormat, functions: Sequence[Function], single: bool) -> Format:
    one: Format = {"type": "or", "elements": [_call_tag(calls, function) for function in functions]}
    separator = {"type": "const_string", "value": "\n" if calls.starts else ", "}
    more = {"type": "repeat", "min": 0, "max": _MAX_CALLS - 1, "content": _sequence(separator, one)}
    several = one if single else _sequence(one, more)
    if calls.starts:
        return several
    return _sequence({"type": "const_string", "value": "["}, several, {"type": "const_string", "value": "]"})


def _strict_format(calls: CallFormat, functions: Sequence[Function], single: bool) -> Format | None:
    """Free text in which calls, once begun, are sound. Only where their beginning is plain text."""
    if not calls.starts or _enforceable(calls) is not calls:
        return None
    return {
        "type": "triggered_tags",
        "triggers": list(calls.starts),
        "tags": [_call_tag(calls, function) for function in functions],
        "stop_after_first": single,
    }


def _call_tag(calls: CallFormat, function: Function) -> Format:
    content = _parameters(function)
    if calls.body == "xml":
        begin, end = f"<tool_call>\n<function={function.name}>\n", "\n</function>\n</tool_call>"
        content = {**content, "style": "qwen_xml"}
    else:
        begin, end = f'{{"name": {json.dumps(function.name)}, "{calls.arguments}": ', "}"
        if calls.starts:
            begin, end = f"{calls.starts[0]}\n{begin}", f"{end}\n{calls.ends[0]}"
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _parameters(function: Function) -> Format:
    """The schema of its arguments; any object if the tool is not strict and its schema cannot be kept."""
    schema = function.parameters or {"type": "object", "properties": {}}
    try:
        return json_schema({"type": "object", **schema}, param="tools")
    except InvalidRequest:
        if function.strict:
            raise
        return json_schema({"type": "object"})


def _after_reasoning(
    wanted: Wanted | None, reasoning: ReasoningFormat, prompt_end: str, budget: int | None, control_texts: Sequence[str]
) -> Wanted | None:
    """Free reasoning, of up to ``budget`` tokens, and then what is wanted."""
    if {reasoning.start, reasoning.end} & set(control_texts):
        if budget is not None:
            what = "is not supported for a model whose reasoning is between control tokens"
            raise wrong("thinking_token_budget", what)
        return wanted
    if wanted is None:
        if budget is None:
            return None
        # Without the exclusion reasoning of any length would pass for an answer.
        wanted = Wanted({**_ANY_TEXT, "excludes": [reasoning.start]}, "thinking_token_budget")
    is_open = prompt_end.endswith(reasoning.start) or reasoning.always
    thoughts = _ANY_TEXT if budget is None else {**_ANY_TEXT, "max_tokens": budget}
    tag = {"type": "tag", "begin": "" if is_open else reasoning.start, "content": thoughts, "end": reasoning.end}
    block = _sequence(tag, _BREAK)
    return Wanted(_sequence(block if is_open else {"type": "optional", "content": block}, wanted.format), wanted.field)


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}
