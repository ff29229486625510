"""Answers of /v1/messages."""

from __future__ import annotations

import json
from typing import Any

from radixserve.server.choice import Choice
from radixserve.server.errors import RequestFailed, messages_error
from radixserve.server.output.deltas import Content, Reasoning
from radixserve.server.protocol.blocks import Block, BlockAnswer
from radixserve.server.protocol.frames import named_event


class MessagesAnswer(BlockAnswer):
    """Each block is a content block."""

    id_prefix = "msg_"
    keep_alive = named_event({"type": "ping"})

    def __init__(self, request_id: str, model: str):
        super().__init__()
        self._id = self.id_prefix + request_id
        self._model = model

    def open_frame(self, choice: Choice) -> bytes:
        return named_event({"type": "message_start", "message": self._message(choice)})

    def start(self, block: Block) -> bytes:
        return named_event({"type": "content_block_start", "index": block.index, "content_block": _content(block)})

    def more(self, block: Block, text: str) -> bytes:
        if block.kind is Content:
            delta = {"type": "text_delta", "text": text}
        elif block.kind is Reasoning:
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        return named_event({"type": "content_block_delta", "index": block.index, "delta": delta})

    def stop(self, block: Block) -> bytes:
        return named_event({"type": "content_block_stop", "index": block.index})

    def ending(self, choice: Choice) -> bytes:
        delta = named_event({"type": "message_delta", "delta": _ending(choice), "usage": _usage(choice)})
        return delta + named_event({"type": "message_stop"})

    def failure(self, error: RequestFailed) -> bytes:
        return named_event(messages_error(error))

    def answer(self, choice: Choice) -> dict[str, Any]:
        return self._message(choice) | {"content": list(map(_content, self._blocks))} | _ending(choice)

    def _message(self, choice: Choice) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(choice),
        }


def _content(block: Block) -> dict[str, Any]:
    if block.kind is Reasoning:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.call is None:
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Empty until the arguments are whole, and if the limit of tokens cut them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _ending(choice: Choice) -> dict[str, Any]:
    matched = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(choice.finish_reason or "")
    if reason is None:
        reason = "end_turn" if matched is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": matched}


def _usage(choice: Choice) -> dict[str, Any]:
    """Here what was cached is no part of the input."""
    return {
        "input_tokens": choice.prompt.num_tokens - choice.cached_tokens,
        "cache_read_input_tokens": choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": choice.num_tokens,
        "output_tokens_details": {"thinking_tokens": choice.num_reasoning_tokens},
    }
