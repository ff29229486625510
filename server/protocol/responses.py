"""The request of /v1/responses, and the chat request that it means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from radixserve.engine.text.conversation import Message
from radixserve.server.protocol.chat import ChatRequest
from radixserve.server.protocol.fields import Harmless, RequestModel, only
from radixserve.server.protocol.generation import SamplingFields
from radixserve.server.protocol.response_items import INPUT_SCHEMA, input_messages
from radixserve.server.protocol.schemas import OBJECT, STRING, any_of, record, tagged
from radixserve.server.protocol.to_chat import function_only, with_system
from radixserve.server.protocol.tools import Function, Tool, ToolChoice

# Where a chat request has what this one calls otherwise.
FIELD_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
}


class ResponseTool(Function):
    type: Literal["function"]

    _no_built_in_tools = model_validator(mode="before")(function_only)

    @property
    def for_chat(self) -> Tool:
        return Tool(type="function", function=Function(**self.model_dump(exclude={"type"})))


def _tool_choice(value: object) -> object:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice.model_validate({"mode": value})
        case {"type": "function", "name": str(name)}:
            return ToolChoice(mode="named", allowed=(name,))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            return ToolChoice(mode=mode, allowed=tuple(map(_named, tools)))
    raise ValueError("must be none, auto, required, a function by its name, or allowed_tools that are functions")


def _named(tool: object) -> str:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
    raise ValueError("must name functions")


_ToolChoiceField = Annotated[
    ToolChoice,
    BeforeValidator(_tool_choice),
    WithJsonSchema(any_of({"enum": ["none", "auto", "required"]}, tagged("function", name=STRING))),
]
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


class ResponsesRequest(SamplingFields):
    input: Annotated[list[dict[str, Any]], BeforeValidator(input_messages), WithJsonSchema(INPUT_SCHEMA)]
    instructions: str | None = Field(None, description="Stands before the input, as a system message")
    max_output_tokens: int | None = Field(None, ge=1, description="Default: the room left in the context")
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[ResponseTool] = Field([], max_length=512)
    tool_choice: _ToolChoiceField | None = None
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
    prompt_cache_key: Harmless = None
    prompt_cache_options: Harmless = None
    prompt_cache_retention: Harmless = None
    safety_identifier: Harmless = None
    service_tier: Harmless = None
    store: Harmless = None
    stream_options: Harmless = None
    user: Harmless = None

    @property
    def messages(self) -> list[Message]:
        return with_system(self.instructions, self.input)

    def for_chat(self) -> ChatRequest:
        """Raises ``InvalidRequest``; ``FIELD_NAMES`` says what its fields are called here."""
        return ChatRequest(
            **self.given_sampling_fields,
            messages=self.messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=self.text.response_format,
            reasoning_effort=self.reasoning.effort,
            tools=[tool.for_chat for tool in self.tools],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            thinking_token_budget=self.thinking_token_budget,
        )
