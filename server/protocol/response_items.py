"""The items of a Responses request as chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from radixserve.engine.text.conversation import Message, as_object, kind_of, parsed_arguments, string_in, text_in, wrong
from radixserve.server.protocol.schemas import JSON_TEXT, STRING, Schema, any_of, list_of, record, tagged
from radixserve.server.protocol.tools import tool_call

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}


def _parts(kinds: Mapping[str, str]) -> Schema:
    return any_of(STRING, list_of(*(tagged(kind, **{key: STRING}) for kind, key in kinds.items())))


_MESSAGE_ITEM = record({"type": {"const": "message"}}, role={"enum": list(_ROLES)}, content=_parts(_PARTS))
_CALL_ITEM = tagged("function_call", call_id=STRING, name=STRING, arguments=JSON_TEXT)
_CALL_OUTPUT_ITEM = tagged("function_call_output", call_id=STRING, output=_parts(_PARTS))
INPUT_SCHEMA = any_of(STRING, list_of(_MESSAGE_ITEM, _CALL_ITEM, _CALL_OUTPUT_ITEM, tagged("reasoning"), at_least=1))


def input_messages(value: object) -> list[Message]:
    """Raises ``InvalidRequest`` naming the item. What the assistant thinks, says and calls in a row is one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", "must be a string or a list of items, not empty")
    messages: list[Message] = []
    for i, item in enumerate(value):
        where = f"input[{i}]"
        item = {"type": "message", **as_object(item, where)}
        if item["type"] == "item_reference":
            raise wrong(where, "item_reference is not supported, since nothing is stored; send the item itself")
        kind, item = kind_of(item, where, _READERS)
        _READERS[kind](messages, item, where)
    if not messages:
        raise wrong("input", "has nothing but reasoning")
    return messages


def _message(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}, not {role!r}")
    content = text_in(item.get("content"), f"{where}.content", _PARTS)
    if role != "assistant":
        messages.append({"role": _ROLES[role], "content": content})
        return
    said = _assistant(messages, lambda last: "content" in last or "tool_calls" in last)
    said["content"] = content


def _reasoning(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Some templates show a model what it thought before it called a tool. Only what stands in plain text can be."""
    key = "content" if item.get("content") else "summary"
    if thought := text_in(item.get(key) or "", f"{where}.{key}", _THOUGHTS):
        _assistant(messages, lambda last: True)["reasoning_content"] = thought


def _call(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    arguments = parsed_arguments(string_in(item, "arguments", where), f"{where}.arguments")
    call = tool_call(string_in(item, "call_id", where), string_in(item, "name", where), arguments)
    _assistant(messages, lambda last: False).setdefault("tool_calls", []).append(call)


def _call_output(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    call_id = string_in(item, "call_id", where)
    content = text_in(item.get("output"), f"{where}.output", _PARTS)
    messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _assistant(messages: list[Message], is_complete: Callable[[Message], bool]) -> Message:
    """The assistant's message that the next item belongs to: the last one, unless it is complete without it."""
    if not messages or messages[-1]["role"] != "assistant" or is_complete(messages[-1]):
        messages.append({"role": "assistant"})
    return messages[-1]


_READERS: dict[str, Callable[[list[Message], Mapping[str, Any], str], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}
