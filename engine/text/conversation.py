"""Checks chat messages and brings them into the one form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from radixserve.engine.errors import InvalidRequest

Message = dict[str, Any]

# Text parts of one message are joined by a line break, as vLLM does.
PART_SEPARATOR = "\n"
# "developer" is what newer OpenAI clients call the system role; templates know only the old name.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def normalize_messages(messages: object) -> list[Message]:
    """Copies of ``messages`` with text content and parsed tool calls. Raises ``InvalidRequest`` naming the message.

    Parts are joined; an assistant's missing content is "" (so no template writes None); an empty ``tool_calls`` is
    dropped; tool call arguments given as JSON text become the object, which templates write out themselves.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with role and content", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r}", param="messages")
    normal: Message = {key: value for key, value in message.items() if value is not None}
    normal["role"] = _ROLES[role]
    calls = normal.pop("tool_calls", None)
    if calls:
        normal["tool_calls"] = _tool_calls(calls, where)
    may_be_empty = role == "assistant" and (calls is not None or "reasoning_content" in normal)
    if "content" not in normal and not may_be_empty:
        raise InvalidRequest(f"{where}.content is missing", param="messages")
    normal["content"] = _text(normal.get("content", ""), where)
    return normal


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", param="messages")
    return PART_SEPARATOR.join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        raise InvalidRequest(f"{where}: part type {kind!r} is not supported; supported: text", param="messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string", param="messages")
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list", param="messages")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must have a function with a name", param="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where}.function.arguments is not valid JSON: {error}", param="messages") from error
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where}.function.arguments must be a JSON object", param="messages")
    return {**call, "function": {**function, "arguments": dict(arguments)}}
