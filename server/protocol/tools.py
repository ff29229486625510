"""Tools of a chat request, and which of them the model may or must call."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from radixserve.engine.errors import InvalidRequest
from radixserve.server.protocol.fields import RequestModel
from radixserve.server.protocol.schemas import STRING, any_of, record, tagged

_NAME = re.compile(r"[\w.:\-]{1,128}", re.ASCII)


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("must be 1 to 128 letters, digits, or one of _ . : -")
    return value


ToolName = Annotated[
    str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"})
]


class Function(RequestModel):
    """``parameters``: a JSON schema of an object; absent: no parameters."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


class ToolChoice(RequestModel):
    """``mode`` auto: the model decides; required: one call or more; named: one call of the one allowed tool."""

    mode: Literal["none", "auto", "required", "named"]
    allowed: tuple[str, ...] | None = None


def _named(value: Any) -> str:
    name = value.get("function", {}).get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError("must name a function")
    return name


def _tool_choice(value: object) -> object:
    if isinstance(value, ToolChoice):
        return value
    if value in ("none", "auto", "required"):
        return ToolChoice.model_validate({"mode": value})
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice(mode="named", allowed=(name,))
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            return ToolChoice(mode=mode, allowed=tuple(map(_named, tools)))
    raise ValueError("must be none, auto, required, a named function, or allowed_tools")


_NAMED_SCHEMA = tagged("function", function=record(name=STRING))
ToolChoiceField = Annotated[
    ToolChoice,
    BeforeValidator(_tool_choice),
    WithJsonSchema(any_of({"enum": ["none", "auto", "required"]}, _NAMED_SCHEMA)),
]
Tools = Annotated[list[Tool], Field(max_length=512)]


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raises ``InvalidRequest``."""
    names = [tool.function.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequest(f"tools: there are two with the name {twice!r}", param="tools")
    if choice is None:
        return
    if choice.mode in ("required", "named") and not tools:
        raise InvalidRequest(f"tool_choice: {choice.mode} needs tools", param="tool_choice")
    if unknown := next((name for name in choice.allowed or () if name not in names), None):
        raise InvalidRequest(f"tool_choice: there is no tool {unknown!r}", param="tool_choice")
