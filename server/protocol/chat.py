"""/v1/chat/completions: its requests and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.sampling_params import MAX_LOGPROBS
from radixserve.engine.text.conversation import Message, normalize_messages, wrong
from radixserve.server.choice import Choice, LogprobToken
from radixserve.server.output.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from radixserve.server.protocol.answers import ChoiceAnswer
from radixserve.server.protocol.fields import Harmless, RequestModel, only
from radixserve.server.protocol.generation_fields import GenerationRequest
from radixserve.server.protocol.logprobs import chat_logprobs
from radixserve.server.protocol.schemas import JSON_TEXT, NULL, STRING, any_of, list_of, record, tagged
from radixserve.server.protocol.tools import Function, ToolChoice, ToolChoiceField, Tools, check_tools

_CONTENT = (STRING, list_of(tagged("text", text=STRING), STRING))
_TOOL_CALL = record(function=record({"arguments": any_of(JSON_TEXT, {"type": ["object", "null"]})}, name=STRING))
_SAID = record(
    {"tool_calls": {"type": ["array", "null"], "items": _TOOL_CALL}},
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content=any_of(*_CONTENT),
)
_CALLED = record({"content": any_of(*_CONTENT, NULL)}, role={"const": "assistant"}, tool_calls=list_of(_TOOL_CALL))
Messages = Annotated[
    list[dict[str, Any]], BeforeValidator(normalize_messages), WithJsonSchema(list_of(_SAID, _CALLED, at_least=1))
]


def with_system(system: str | None, messages: list[Message]) -> list[Message]:
    """``system``, which other APIs have apart, before all else. Many templates take one system message, so it is put
    into one that comes first."""
    if not system:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    first = messages[0]["content"]
    return [{"role": "system", "content": f"{system}\n\n{first}" if first else system}, *messages[1:]]


class ChatPromptRequest(RequestModel):
    """The part of a chat request that makes its prompt; also what /render and /tokenize take."""

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="Default: true, false with continue_final_message")
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = Field(None, description='Handed to the chat template; "none": do not reason')
    tools: Tools = []
    tool_choice: ToolChoiceField = Field(default_factory=ToolChoice)

    @model_validator(mode="after")
    def _check_prompt(self) -> ChatPromptRequest:
        check_tools(self.tools, self.tool_choice)
        if self.continue_final_message and not (self.messages and self.messages[-1]["role"] == "assistant"):
            raise wrong("continue_final_message", "the last message must be the assistant's")
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
        if self.tool_choice.mode == "none":
            return []
        allowed = self.tool_choice.allowed
        return [tool.function for tool in self.tools if allowed is None or tool.function.name in allowed]

    @property
    def prompt_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates want them: all of them, so that a choice among them keeps the cached prefix."""
        if self.tool_choice.mode == "none":
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


class ChatAnswer(ChoiceAnswer):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    _request: ChatRequest

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = self._message(choice)
        whole: dict[str, Any] = {"index": choice.index, "message": message, "logprobs": None}
        self.add_tokens(whole, choice)
        return whole | self.finish_fields(choice)

    def _message(self, choice: Choice) -> dict[str, Any]:
        """Content is null only beside tool calls."""
        deltas = self.told(choice)
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        calls = [_call(delta, deltas) for delta in deltas if isinstance(delta, CallStart)]
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if reasoning := "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)):
            message |= _reasoning(reasoning)
        return message

    def told(self, choice: Choice) -> list[Delta]:
        deltas = choice.take_deltas()
        if self._request.include_reasoning:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, Reasoning)]

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self.piece(choice.index, None) | {"delta": {"role": "assistant", "content": ""}}

    def piece(self, index: int, delta: Delta | None) -> dict[str, Any]:
        said: dict[str, Any] = {}
        match delta:
            case Content(text):
                said = {"content": text}
            case Reasoning(text):
                said = _reasoning(text)
            case CallStart(call, call_id, name):
                function = {"name": name, "arguments": ""}
                said = {"tool_calls": [{"index": call, "id": call_id, "type": "function", "function": function}]}
            case CallArguments(call, text):
                said = {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
        return {"index": index, "delta": said, "logprobs": None, "finish_reason": None}

    def shape_logprobs(self, choice: Choice, tokens: Sequence[LogprobToken]) -> dict[str, Any]:
        return chat_logprobs(tokens, self._vocabulary)

    def answer_fields(self, choice: Choice) -> dict[str, Any]:
        return self.prompt_fields(choice)


def _reasoning(text: str) -> dict[str, str]:
    """Under the name that most clients know, and under vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(start: CallStart, deltas: Sequence[Delta]) -> dict[str, Any]:
    arguments = "".join(d.text for d in deltas if isinstance(d, CallArguments) and d.index == start.index)
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}
