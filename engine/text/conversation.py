"""Checks chat messages and brings them into the one form that chat templates expect. Errors name the place as a path:
``messages[0].content[1].type``."""

import json
from collections.abc import Mapping
from typing import Any

from radixserve.engine.errors import InvalidRequest

# Text parts of one message are joined by a line break, as vLLM does.
PART_SEPARATOR = "\n"


def wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {what}", param=where)


def as_object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong(where, "must be an object")
    return value


def string_in(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise wrong(f"{where}.{key}", "must be a string")
    return value


def text_in(content: object, where: str, kinds: Mapping[str, str]) -> str:
    """A string, or parts joined by line breaks. ``kinds``: where the text is, for each type of part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind, fields = kind_of(part, f"{where}[{i}]", kinds)
        texts.append(string_in(fields, kinds[kind], f"{where}[{i}]"))
    return PART_SEPARATOR.join(texts)


def kind_of(item: object, where: str, kinds: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The ``type`` of an item, which must be one of ``kinds``, and the item."""
    item = as_object(item, where)
    kind = item.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise wrong(f"{where}.type", f"{kind!r} is not supported: only text is read; supported: {', '.join(kinds)}")
    return kind, item


def parsed_arguments(text: str, where: str) -> Mapping[str, Any]:
    """Of a call, as its model wrote them."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise wrong(where, f"is not valid JSON: {error}") from None
    return as_object(value, where)


Message = dict[str, Any]

# "developer" is what newer OpenAI clients call the system role; templates know only the old name.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def normalize_messages(messages: object) -> list[Message]:
    """Copies of ``messages`` with text content and parsed tool calls. Raises ``InvalidRequest`` naming the message.

    Parts are joined; an assistant's missing content is "" (so no template writes None); an empty ``tool_calls`` is
    dropped; tool call arguments given as JSON text become the object, which templates write out themselves.
    """
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "must be a list with at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, where: str) -> Message:
    message = as_object(message, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}, not {role!r}")
    normal: Message = {key: value for key, value in message.items() if value is not None}
    normal["role"] = _ROLES[role]
    if "reasoning" in normal:  # another name for it, which answers have as well
        normal.setdefault("reasoning_content", normal["reasoning"])
    calls = normal.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", "must be a list")
        normal["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    may_be_empty = role == "assistant" and (calls is not None or "reasoning_content" in normal)
    if "content" not in normal and not may_be_empty:
        raise wrong(f"{where}.content", "is missing")
    content = normal.get("content", "")
    if isinstance(content, list):
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    normal["content"] = text_in(content, f"{where}.content", {"text": "text"})
    return normal


def _tool_call(call: object, where: str) -> dict[str, Any]:
    call = as_object(call, where)
    function = as_object(call.get("function"), f"{where}.function")
    string_in(function, "name", f"{where}.function")
    arguments, place = function.get("arguments") or {}, f"{where}.function.arguments"
    parsed = parsed_arguments(arguments, place) if isinstance(arguments, str) else as_object(arguments, place)
    return {**call, "function": {**function, "arguments": dict(parsed)}}
