"""/v1/responses: its request, the chat request that it means, and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from radixserve.engine.text.conversation import Message, as_object, kind_of, parsed_arguments, string_in, text_in, wrong
from radixserve.server.choice import Choice
from radixserve.server.errors import RequestFailed
from radixserve.server.output.deltas import CallStart, Content, Reasoning
from radixserve.server.protocol.answers import Block, BlockAnswer, Kind, named_event
from radixserve.server.protocol.chat import ChatRequest, with_system
from radixserve.server.protocol.fields import Harmless, RequestModel, only
from radixserve.server.protocol.generation_fields import OpenAiHints, SamplingFields
from radixserve.server.protocol.schemas import JSON_TEXT, OBJECT, STRING, Schema, any_of, list_of, record, tagged
from radixserve.server.protocol.tools import FlatTool, ToolChoice, ToolChoiceField, tool_call

# ---- items of the input as chat messages ----

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


# ---- the request ----


class ResponseTool(FlatTool):
    type: Literal["function"]


_FORMAT_SCHEMA = any_of(
    record(type={"enum": ["text", "json_object"]}), tagged("json_schema", name=STRING, schema=OBJECT)
)


class TextOptions(RequestModel):
    format: Annotated[dict[str, Any], WithJsonSchema(_FORMAT_SCHEMA)] = {"type": "text"}
    verbosity: Annotated[str, only("medium")] | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        """As chat completions have it: there, what a schema is described by is a level deeper."""
        if self.format.get("type") != "json_schema":
            return self.format
        return {"type": "json_schema", "json_schema": {key: self.format[key] for key in self.format.keys() - {"type"}}}


class ReasoningOptions(RequestModel):
    effort: str | None = Field(None, description='Handed to the chat template; "none": do not reason')
    summary: Harmless = None
    generate_summary: Harmless = None


def _nothing_stored(_: object) -> object:
    raise ValueError("is not supported, since nothing is stored; send the earlier items again as input")


def _included(values: list[str]) -> list[str]:
    """What belongs to tools that are never called is left out in any case, and reasoning is not encrypted."""
    if "message.output_text.logprobs" in values:
        raise ValueError("message.output_text.logprobs is not supported; /v1/chat/completions has logprobs")
    return values


_NotStored = Annotated[object, AfterValidator(_nothing_stored), WithJsonSchema({"type": "null"})]


class ResponsesRequest(SamplingFields, OpenAiHints):
    field_names = {
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
    }
    input: Annotated[list[dict[str, Any]], BeforeValidator(input_messages), WithJsonSchema(INPUT_SCHEMA)]
    instructions: str | None = Field(None, description="Stands before the input, as a system message")
    max_output_tokens: int | None = Field(None, ge=1, description="Default: the room left in the context")
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[ResponseTool] = Field([], max_length=512)
    tool_choice: ToolChoiceField = ToolChoice()
    parallel_tool_calls: bool = Field(True, description="false: one call at most")
    metadata: dict[str, str] = Field({}, description="Told in the answer")
    chat_template_kwargs: dict[str, Any] = {}
    thinking_token_budget: int | None = Field(None, ge=0, description="Most tokens of reasoning")

    previous_response_id: _NotStored = None
    conversation: _NotStored = None
    include: Annotated[list[str], AfterValidator(_included)] = []
    background: Annotated[object, only(False)] = None
    context_management: Annotated[object, only([])] = None
    moderation: Annotated[object, only()] = None
    image: Annotated[object, only()] = None
    prompt: Annotated[object, only()] = None
    top_logprobs: Annotated[object, only(0)] = None
    truncation: Annotated[object, only("disabled")] = None

    access_programs: Harmless = None
    background_options: Harmless = None
    max_tool_calls: Harmless = None
    stream_options: Harmless = None

    def for_chat(self) -> ChatRequest:
        """Raises ``InvalidRequest``; ``field_names`` says what its fields are called here."""
        return ChatRequest(
            **self.given_sampling_fields,
            messages=with_system(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            response_format=self.text.response_format,
            reasoning_effort=self.reasoning.effort,
            tools=[tool.for_chat for tool in self.tools],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            thinking_token_budget=self.thinking_token_budget,
        )


# ---- the answer ----

_ID_PREFIXES: dict[Kind, str] = {Content: "msg_", Reasoning: "rs_", CallStart: "fc_"}
_DELTAS: dict[Kind, str] = {
    Content: "response.output_text",
    Reasoning: "response.reasoning_text",
    CallStart: "response.function_call_arguments",
}


@dataclass
class ResponsesAnswer(BlockAnswer):
    """Each block is an output item. Events are numbered."""

    id_prefix = "resp_"

    request_id: str
    model: str
    request: ResponsesRequest
    _created: int = field(default_factory=lambda: int(time.time()))
    _num_events: int = 0

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
        request, has_ended = self.request, status != "in_progress"
        sampling = choice.sampling if choice else None
        return {
            "id": self.id_prefix + self.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [self._item(block, _status(block)) for block in self._blocks] if has_ended else [],
            "usage": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": sampling.temperature if sampling else request.temperature,
            "top_p": sampling.top_p if sampling else request.top_p,
            "text": {"format": request.text.format},
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "tools": [tool.model_dump() for tool in request.tools],
            "tool_choice": request.tool_choice.given,
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
        return f"{_ID_PREFIXES[block.kind]}{self.request_id}_{block.index}"


def _part(block: Block) -> dict[str, Any]:
    if block.kind is Reasoning:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _status(block: Block) -> str:
    return "incomplete" if block.cut else "completed"


def _usage(choice: Choice) -> dict[str, Any]:
    return {
        "input_tokens": choice.prompt.num_tokens,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": choice.num_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
        "total_tokens": choice.prompt.num_tokens + choice.num_tokens,
    }
