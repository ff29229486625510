"""Tools of a chat request, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from radixserve.engine.text.conversation import wrong
from radixserve.server.protocol.fields import Name, RequestModel
from radixserve.server.protocol.schemas import STRING, any_of, record, tagged


class Function(RequestModel):
    """``parameters``: a JSON schema of an object; absent: no parameters."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


class FlatTool(Function):
    """As APIs other than chat completions have it: without a level for the function."""

    @model_validator(mode="before")
    @classmethod
    def _no_built_in_tools(cls, tool: object) -> object:
        """Refused by their name, before other fields are looked at."""
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "function", "custom"):
            raise ValueError(f"built-in tool {kind!r} is not supported by this server; functions are")
        return tool

    @property
    def for_chat(self) -> Tool:
        return Tool(type="function", function=Function(**self.model_dump(exclude={"type"})))


class ToolChoice(RequestModel):
    """``mode`` auto: the model decides; required: one call or more; named: one call of the one allowed tool. ``given``:
    as the request has it."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    allowed: tuple[str, ...] | None = None
    given: Any = "auto"


def _tool_choice(value: object) -> ToolChoice:
    """In the form of chat completions or in that of responses, where the names are a level higher."""
    match value:
        case ToolChoice():
            return value
        case "none" | "auto" | "required" as mode:
            return ToolChoice(mode=mode, given=value)
        case {"type": "function", "name": str(name)} | {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice(mode="named", allowed=(name,), given=value)
        case {"type": "allowed_tools", "allowed_tools": {**allowed}} | {"type": "allowed_tools", **allowed}:
            match allowed:
                case {"mode": "auto" | "required" as mode, "tools": [*tools]}:
                    return ToolChoice(mode=mode, allowed=tuple(map(_named, tools)), given=value)
    raise ValueError("must be none, auto, required, a named function, or allowed_tools that are functions")


def _named(tool: object) -> str:
    match tool:
        case {"type": "function", "name": str(name)} | {"function": {"name": str(name)}}:
            return name
    raise ValueError("must name functions")


ToolChoiceField = Annotated[
    ToolChoice,
    BeforeValidator(_tool_choice),
    WithJsonSchema(
        any_of(
            {"enum": ["none", "auto", "required"]},
            tagged("function", function=record(name=STRING)),
            tagged("function", name=STRING),
        )
    ),
]
Tools = Annotated[list[Tool], Field(max_length=512)]


def check_tools(tools: list[Tool], choice: ToolChoice) -> None:
    """Raises ``InvalidRequest``."""
    names = [tool.function.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise wrong("tools", f"there are two with the name {twice!r}")
    if choice.mode in ("required", "named") and not tools:
        raise wrong("tool_choice", f"{choice.mode} needs tools")
    if unknown := next((name for name in choice.allowed or () if name not in names), None):
        raise wrong("tool_choice", f"there is no tool {unknown!r}")


def tool_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
