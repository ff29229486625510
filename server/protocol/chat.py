"""The request of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.sampling_params import MAX_LOGPROBS
from radixserve.engine.text.conversation import normalize_messages
from radixserve.server.protocol.fields import Harmless, RequestModel, only
from radixserve.server.protocol.generation import GenerationRequest
from radixserve.server.protocol.schemas import JSON_TEXT, NULL, STRING, any_of, list_of, record, tagged
from radixserve.server.protocol.tools import Function, ToolChoiceField, Tools, check_tools

_CONTENT = (STRING, list_of(tagged("text", text=STRING), STRING))
_TOOL_CALL = record(function=record({"arguments": any_of(JSON_TEXT, {"type": ["object", "null"]})}, name=STRING))
_SAID = record(
    {"tool_calls": {"type": ["array", "null"], "items": _TOOL_CALL}},
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content=any_of(*_CONTENT),
)
_CALLED = record(
    {"content": any_of(*_CONTENT, NULL)},
    role={"const": "assistant"},
    tool_calls=list_of(_TOOL_CALL),
)
Messages = Annotated[
    list[dict[str, Any]],
    BeforeValidator(normalize_messages),
    WithJsonSchema(list_of(_SAID, _CALLED, at_least=1)),
]


class ChatPromptRequest(RequestModel):
    """The part of a chat request that makes its prompt; also what /render and /tokenize take."""

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="Default: true, false with continue_final_message")
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = Field(None, description='Handed to the chat template; "none": do not reason')
    tools: Tools = []
    tool_choice: ToolChoiceField | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> ChatPromptRequest:
        check_tools(self.tools, self.tool_choice)
        if self.continue_final_message and self.messages[-1]["role"] != "assistant":
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
        effort: dict[str, Any] = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        if self.reasoning_effort == "none":
            effort["enable_thinking"] = False
        return effort | self.chat_template_kwargs

    @property
    def callable_functions(self) -> list[Function]:
        """What the model may call now."""
        choice = self.tool_choice
        if choice is not None and choice.mode == "none":
            return []
        functions = [tool.function for tool in self.tools]
        if choice is None or choice.allowed is None:
            return functions
        return [function for function in functions if function.name in choice.allowed]

    @property
    def prompt_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates want them: all of them, so that a choice among them keeps the cached prefix."""
        if self.tool_choice is not None and self.tool_choice.mode == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class ChatRequest(GenerationRequest, ChatPromptRequest):
    max_completion_tokens: int | None = Field(None, ge=1, description="Wins over max_tokens")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    thinking_token_budget: int | None = Field(None, ge=0, description="Most tokens of reasoning")
    include_reasoning: bool = Field(True, description="false: reason, but do not tell it")
    separate_reasoning: bool = Field(True, description="false: leave reasoning in the content")

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
    def token_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
