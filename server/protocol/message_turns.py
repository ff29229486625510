"""The turns of a Messages request as chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixserve.engine.text.conversation import PART_SEPARATOR, Message, as_object, kind_of, string_in, text_in, wrong
from radixserve.server.protocol.schemas import BOOLEAN, OBJECT, STRING, Schema, any_of, list_of, record, tagged
from radixserve.server.protocol.tools import tool_call

_TEXT = {"text": "text"}
_USER_BLOCKS = {"text": "text", "tool_result": "content"}
_ASSISTANT_BLOCKS = {"text": "text", "tool_use": "input", "thinking": "thinking", "redacted_thinking": "data"}


def _turn(role: str, *blocks: Schema) -> Schema:
    return record(role={"const": role}, content=any_of(STRING, list_of(*blocks, at_least=1)))


_TEXT_BLOCK = tagged("text", text=STRING)
TEXT_SCHEMA = any_of(STRING, list_of(_TEXT_BLOCK))
_RESULT = tagged("tool_result", {"content": TEXT_SCHEMA, "is_error": BOOLEAN}, tool_use_id=STRING)
_USE = tagged("tool_use", id=STRING, name=STRING, input=OBJECT)
_THINKING = tagged("thinking", thinking=STRING)
_REDACTED = tagged("redacted_thinking")
MESSAGES_SCHEMA = list_of(
    _turn("user", _TEXT_BLOCK, _RESULT), _turn("assistant", _TEXT_BLOCK, _USE, _THINKING, _REDACTED), at_least=1
)


def system_text(value: object) -> str:
    return text_in(value, "system", _TEXT)


def turn_messages(value: object) -> list[Message]:
    """Raises ``InvalidRequest`` naming the block."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", "must be a list of messages, not empty")
    messages: list[Message] = []
    for i, turn in enumerate(value):
        where = f"messages[{i}]"
        turn = as_object(turn, where)
        content = turn.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not blocks:
            raise wrong(f"{where}.content", "must be a string or a list of blocks, not empty")
        match turn.get("role"):
            case "user":
                _add_user(messages, blocks, f"{where}.content")
            case "assistant":
                messages.append(_assistant(blocks, f"{where}.content"))
            case role:
                raise wrong(f"{where}.role", f"must be user or assistant, not {role!r}")
    if "tool_calls" in messages[-1]:
        raise wrong(f"messages[{len(value) - 1}]", "calls tools; a message with their results must follow")
    return messages


def _add_user(messages: list[Message], blocks: list[Any], where: str) -> None:
    for i, block in enumerate(blocks):
        kind, block = kind_of(block, f"{where}[{i}]", _USER_BLOCKS)
        if kind == "tool_result":
            messages.append(_result(block, f"{where}[{i}]"))
            continue
        text = string_in(block, "text", f"{where}[{i}]")
        # As Anthropic has it, what a user says in a row is one turn; and many templates allow no other.
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += PART_SEPARATOR + text
        else:
            messages.append({"role": "user", "content": text})


def _result(block: Mapping[str, Any], where: str) -> Message:
    """Templates know of no errors, so the text says it."""
    text = text_in(block.get("content") or "", f"{where}.content", _TEXT)
    is_error = block.get("is_error") or False
    if not isinstance(is_error, bool):
        raise wrong(f"{where}.is_error", "must be a boolean")
    tool_use_id = string_in(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": tool_use_id, "content": f"Error: {text}" if is_error else text}


def _assistant(blocks: list[Any], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        kind, block = kind_of(block, here, _ASSISTANT_BLOCKS)
        if kind == "text":
            texts.append(string_in(block, "text", here))
        elif kind == "thinking":
            thoughts.append(string_in(block, "thinking", here))
        elif kind == "tool_use":
            arguments = as_object(block.get("input"), f"{here}.input")
            calls.append(tool_call(string_in(block, "id", here), string_in(block, "name", here), arguments))
    message: Message = {"role": "assistant", "content": PART_SEPARATOR.join(texts)}
    if thought := PART_SEPARATOR.join(thoughts):
        message["reasoning_content"] = thought
    return message | {"tool_calls": calls} if calls else message
