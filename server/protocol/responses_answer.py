"""Answers of /v1/responses."""

from __future__ import annotations

import time
from typing import Any

from radixserve.server.choice import Choice
from radixserve.server.errors import RequestFailed
from radixserve.server.output.deltas import CallStart, Content, Reasoning
from radixserve.server.protocol.blocks import Block, BlockAnswer, Kind
from radixserve.server.protocol.frames import named_event
from radixserve.server.protocol.responses import ResponsesRequest
from radixserve.server.protocol.tools import ToolChoice

_ID_PREFIXES: dict[Kind, str] = {Content: "msg_", Reasoning: "rs_", CallStart: "fc_"}
_DELTAS: dict[Kind, str] = {
    Content: "response.output_text",
    Reasoning: "response.reasoning_text",
    CallStart: "response.function_call_arguments",
}


class ResponsesAnswer(BlockAnswer):
    """Each block is an output item. Events are numbered."""

    id_prefix = "resp_"

    def __init__(self, request_id: str, model: str, request: ResponsesRequest):
        super().__init__()
        self._request_id = request_id
        self._model = model
        self._request = request
        self._created = int(time.time())
        self._num_events = 0

    # ---- events ----

    def open_frame(self, choice: Choice) -> bytes:
        response = self._response(choice, "in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def start(self, block: Block) -> bytes:
        frame = self._event("response.output_item.added", output_index=block.index, item=self._item(block, None))
        if block.call is None:
            frame += self._block_event("response.content_part.added", block, part=_part(block))
        return frame

    def more(self, block: Block, text: str) -> bytes:
        return self._block_event(_DELTAS[block.kind] + ".delta", block, delta=text)

    def stop(self, block: Block) -> bytes:
        key = "arguments" if block.call else "text"
        frame = self._block_event(_DELTAS[block.kind] + ".done", block, **{key: block.text})
        if block.call is None:
            frame += self._block_event("response.content_part.done", block, part=_part(block))
        item = self._item(block, _status(block))
        return frame + self._event("response.output_item.done", output_index=block.index, item=item)

    def end_frame(self, choice: Choice) -> bytes:
        """An answer without a word is a message without a word."""
        return (b"" if self._blocks else self.begin(Content)) + super().end_frame(choice)

    def ending(self, choice: Choice) -> bytes:
        response = self.answer(choice)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: RequestFailed) -> bytes:
        if self._blocks:
            self._blocks[-1].cut = True
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        if error.status == 429:
            code = "rate_limit_exceeded"
        fault = {"code": code, "message": error.message}
        return self._event("response.failed", response=self._response(None, "failed") | {"error": fault})

    def _block_event(self, kind: str, block: Block, **fields: Any) -> bytes:
        where: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.call is None:
            where["content_index"] = 0
        if kind.startswith(_DELTAS[Content]):
            where["logprobs"] = []
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": number, **fields})

    # ---- objects ----

    def answer(self, choice: Choice) -> dict[str, Any]:
        if choice.finish_reason != "length":
            return self._response(choice, "completed") | {"usage": _usage(choice), "completed_at": int(time.time())}
        response = self._response(choice, "incomplete") | {"usage": _usage(choice)}
        return response | {"incomplete_details": {"reason": "max_output_tokens"}}

    def _response(self, choice: Choice | None, status: str) -> dict[str, Any]:
        request, has_ended = self._request, status != "in_progress"
        sampling = choice.sampling if choice else None
        return {
            "id": self.id_prefix + self._request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [self._item(block, _status(block)) for block in self._blocks] if has_ended else [],
            "usage": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": sampling.temperature if sampling else request.temperature,
            "top_p": sampling.top_p if sampling else request.top_p,
            "text": {"format": request.text.format},
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "tools": [tool.model_dump() for tool in request.tools],
            "tool_choice": _tool_choice(request.tool_choice),
            "parallel_tool_calls": request.parallel_tool_calls,
            "metadata": request.metadata,
            "store": False,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
        }

    def _item(self, block: Block, status: str | None) -> dict[str, Any]:
        """``status`` None: it has only begun."""
        item = {"id": self._item_id(block), "status": status or "in_progress"}
        parts = [_part(block)] if status else []
        if block.kind is Reasoning:
            return item | {"type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
        if block.call is None:
            return item | {"type": "message", "role": "assistant", "content": parts}
        call = block.call
        return item | {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": block.text}

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}{self._request_id}_{block.index}"


def _part(block: Block) -> dict[str, Any]:
    if block.kind is Reasoning:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _status(block: Block) -> str:
    return "incomplete" if block.cut else "completed"


def _tool_choice(choice: ToolChoice | None) -> object:
    if choice is None:
        return "auto"
    tools = [{"type": "function", "name": name} for name in choice.allowed or ()]
    if choice.mode == "named":
        return tools[0]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": tools} if tools else choice.mode


def _usage(choice: Choice) -> dict[str, Any]:
    return {
        "input_tokens": choice.prompt.num_tokens,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": choice.num_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
        "total_tokens": choice.prompt.num_tokens + choice.num_tokens,
    }
