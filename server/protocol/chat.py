"""The request of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.sampling_params import MAX_LOGPROBS
from radixserve.engine.text.conversation import normalize_messages
from radixserve.server.protocol.fields import Harmless, RequestModel, only
from radixserve.server.protocol.generation import GenerationRequest

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = [{"type": "string"}, {"type": "array", "items": {"anyOf": [_TEXT_PART, {"type": "string"}]}}]
_TOOL_CALL = {
    "type": "object",
    "properties": {
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {
                    "anyOf": [{"type": "string", "contentMediaType": "application/json"}, {"type": ["object", "null"]}]
                },
            },
            "required": ["name"],
        }
    },
    "required": ["function"],
}
_SAID = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": _CONTENT},
        "tool_calls": {"type": ["array", "null"], "items": _TOOL_CALL},
    },
    "required": ["role", "content"],
}
_CALLED = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"anyOf": [*_CONTENT, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": _TOOL_CALL},
    },
    "required": ["role", "tool_calls"],
}
Messages = Annotated[
    list[dict[str, Any]],
    BeforeValidator(normalize_messages),
    WithJsonSchema({"type": "array", "items": {"anyOf": [_SAID, _CALLED]}, "minItems": 1}),
]


class ChatPromptRequest(RequestModel):
    """The part of a chat request that makes its prompt; also what /render and /tokenize take."""

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="Default: true, false with continue_final_message")
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = Field(None, description="Handed to the chat template")
    tools: list[dict[str, Any]] = []
    tool_choice: Annotated[object, only("none", "auto")] = None

    @model_validator(mode="after")
    def _check_prompt(self) -> ChatPromptRequest:
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest("tools: is not supported by this server (except with tool_choice none)", param="tools")
        if not self.continue_final_message:
            return self
        if self.messages[-1]["role"] != "assistant":
            raise InvalidRequest(
                "continue_final_message: the last message must be the assistant's", param="continue_final_message"
            )
        return self

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the header of the assistant's next turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return effort | self.chat_template_kwargs


class ChatRequest(GenerationRequest, ChatPromptRequest):
    max_completion_tokens: int | None = Field(None, ge=1, description="Wins over max_tokens")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    parallel_tool_calls: Harmless = None
    prediction: Harmless = None
    modalities: Annotated[object, only(["text"])] = None
    audio: Annotated[object, only()] = None
    functions: Annotated[object, only([])] = None
    function_call: Annotated[object, only("none", "auto")] = None
    web_search_options: Annotated[object, only()] = None
    verbosity: Annotated[object, only("medium")] = None
    moderation: Annotated[object, only()] = None
    chat_template: Annotated[object, only()] = None
    documents: Annotated[object, only([])] = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
