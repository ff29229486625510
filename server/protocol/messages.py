"""/v1/messages and /v1/messages/count_tokens: requests, the chat requests that they mean, and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from radixserve.engine.text.conversation import PART_SEPARATOR, Message, as_object, kind_of, string_in, text_in, wrong
from radixserve.server.choice import Choice
from radixserve.server.errors import RequestFailed, messages_error
from radixserve.server.output.deltas import Content, Reasoning
from radixserve.server.protocol.answers import Block, BlockAnswer, named_event
from radixserve.server.protocol.chat import ChatPromptRequest, ChatRequest, with_system
from radixserve.server.protocol.fields import Harmless, RequestModel, Stop, only
from radixserve.server.protocol.generation_fields import SamplingFields
from radixserve.server.protocol.schemas import BOOLEAN, OBJECT, STRING, Schema, any_of, list_of, record, tagged
from radixserve.server.protocol.tools import FlatTool, ToolChoice, tool_call

# ---- turns as chat messages ----

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


# ---- requests ----


class MessagesTool(FlatTool):
    parameters: dict[str, Any] = Field(alias="input_schema")
    type: Literal["custom"] | None = None


class MessagesToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> MessagesToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("type tool needs the name of a tool")
        return self

    @property
    def for_chat(self) -> ToolChoice:
        match self.type:
            case "any":
                return ToolChoice(mode="required")
            case "tool":
                return ToolChoice(mode="named", allowed=(self.name or "",))
            case mode:
                return ToolChoice(mode=mode)


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, description="Most tokens of thinking")
    display: Annotated[str, only("summarized")] | None = None


class JsonFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: str | None = Field(None, description="Handed to the chat template as reasoning_effort")
    format: JsonFormat | None = None


class MessagesPrompt(RequestModel):
    """What makes the prompt."""

    field_names = {
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
        "stop": "stop_sequences",
    }

    messages: Annotated[list[dict[str, Any]], BeforeValidator(turn_messages), WithJsonSchema(MESSAGES_SCHEMA)]
    system: Annotated[str, BeforeValidator(system_text), WithJsonSchema(TEXT_SCHEMA)] = ""
    tools: list[MessagesTool] = Field([], max_length=512)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] = {}

    cache_control: Harmless = None
    speed: Harmless = None
    user_profile_id: Harmless = None
    workspace_id: Harmless = None

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """Of a ``ChatPromptRequest``. A last message of the assistant is one to go on with."""
        return {
            "messages": with_system(self.system, self.messages),
            "continue_final_message": self.messages[-1]["role"] == "assistant",
            "tools": [tool.for_chat for tool in self.tools],
            "tool_choice": self.tool_choice.for_chat if self.tool_choice else ToolChoice(),
            "reasoning_effort": self.output_config.effort,
            "chat_template_kwargs": self._thinking_switch | self.chat_template_kwargs,
        }

    @property
    def _thinking_switch(self) -> dict[str, Any]:
        """What the templates of models that think now and then are told; without it they do as they like."""
        match self.thinking:
            case Thinking(type="enabled" | "disabled" as kind):
                return {"enable_thinking": kind == "enabled"}
        return {}


class CountTokensRequest(MessagesPrompt):
    model: str | None = None

    def for_chat(self) -> ChatPromptRequest:
        """Raises ``InvalidRequest``; ``field_names`` says what its fields are called here."""
        return ChatPromptRequest(**self.prompt_fields)


class MessagesRequest(SamplingFields, MessagesPrompt):
    max_tokens: int = Field(ge=1, description="Limited to the room left in the context")
    stop_sequences: Stop = []

    container: Annotated[object, only()] = None
    mcp_servers: Annotated[object, only([])] = None

    diagnostics: Harmless = None
    inference_geo: Harmless = None
    metadata: Harmless = None
    service_tier: Harmless = None

    def for_chat(self, max_model_len: int) -> ChatRequest:
        """Raises ``InvalidRequest``. Clients must send a limit, and do not know the context's length (in tokens):
        a higher one means all there is."""
        form, choice = self.output_config.format, self.tool_choice
        described = {"type": "json_schema", "json_schema": {"schema": form.json_schema}} if form else None
        return ChatRequest(
            **self.given_sampling_fields,
            **self.prompt_fields,
            max_completion_tokens=min(self.max_tokens, max_model_len),
            stop=self.stop_sequences,
            response_format=described,
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            thinking_token_budget=self.thinking.budget_tokens if self.thinking else None,
        )


# ---- answers ----


@dataclass
class MessagesAnswer(BlockAnswer):
    """Each block is a content block."""

    id_prefix = "msg_"
    keep_alive = named_event({"type": "ping"})

    request_id: str
    model: str

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
            "id": self.id_prefix + self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
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
