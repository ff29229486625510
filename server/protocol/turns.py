"""What the messages of other APIs are made of, on their way to the one form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.text.conversation import PART_SEPARATOR, Message


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
    return PART_SEPARATOR.join(_part(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def _part(part: object, where: str, kinds: Mapping[str, str]) -> str:
    kind, part = kind_of(part, where, kinds)
    return string_in(part, kinds[kind], where)


def kind_of(item: object, where: str, kinds: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The ``type`` of an item, which must be one of ``kinds``, and the item."""
    item = as_object(item, where)
    kind = item.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        what = f"{kind!r} is not supported by this server, which reads text only; supported: {', '.join(kinds)}"
        raise wrong(f"{where}.type", what)
    return kind, item


def tool_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def parsed_arguments(text: str, where: str) -> Mapping[str, Any]:
    """Of a call, as its model wrote them."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise wrong(where, f"is not valid JSON: {error}") from None
    return as_object(value, where)


def with_system(system: str | None, messages: list[Message]) -> list[Message]:
    """``system`` before all else. Many templates take one system message, so it is put into one that comes first."""
    if not system:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    first = messages[0]["content"]
    return [{"role": "system", "content": f"{system}\n\n{first}" if first else system}, *messages[1:]]


def function_only(tool: object) -> object:
    """Refuses built-in tools by their name, before their other fields are looked at."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind not in (None, "function", "custom"):
        raise ValueError(f"built-in tool {kind!r} is not supported by this server; functions are")
    return tool
