"""Tools for models whose chat template does not know any: a system text, and calls and results as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixserve.engine.text.conversation import Message

_SYSTEM = """\
You can call these functions:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON, once for each call:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>
If no function is needed, answer in plain text."""


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Normalized ``messages`` that tell of ``tools`` in the words that ``hermes`` is read by."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _SYSTEM.format(tools=listed)
    plain = [_plain(message) for message in messages]
    if plain[0]["role"] == "system":
        first = plain.pop(0)
        text = f"{first['content']}\n\n{text}" if first["content"] else text
    return [{"role": "system", "content": text}, *plain]


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [_call(call["function"]) for call in calls]
    content = "\n".join([message["content"], *written] if message["content"] else written)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _call(function: Mapping[str, Any]) -> str:
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
