"""What the requests of other APIs share on their way to a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixserve.engine.text.conversation import Message


def tool_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


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
