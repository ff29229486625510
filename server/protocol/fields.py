"""What the request models are made of: strictness, field types with their checks, and the way from a body to a model.

Everything that a request may contain is declared in a model, once. A field is honoured, or harmless (accepted and not
used), or ``only(...)`` the values that ask for nothing. What no model declares is ignored, and the answer says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue

from radixserve.engine.errors import InvalidRequest
from radixserve.server.errors import invalid_body
from radixserve.server.protocol.schemas import NON_EMPTY, any_of, list_of

_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
_HEADER_SAFE = re.compile(r"[\w.\-]{1,64}", re.ASCII)
_NAME = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
_MAX_IGNORED_NAMES = 16
# Every character of an answer is held against each stop string, in the event loop that all requests share.
_MAX_STOPS = 128
_MAX_STOP_CHARS = 16_384


class RequestModel(BaseModel):
    """Strict: a boolean is no number, a string no integer. JSON has no tuples, so sequences are lists.

    ``field_names``: what this body calls a field that it is turned into, by the name of that, the longest paths first.
    """

    field_names: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


Model = TypeVar("Model", bound=RequestModel)


def parse_body(model: type[Model], body: bytes) -> tuple[Model, list[str]]:
    """The body as ``model``, and the names of the fields that nobody knows. A null is the same as no field.

    Raises ``InvalidRequest``.
    """
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    known = model.model_fields
    unknown = [name for name in fields if name not in known and _HEADER_SAFE.fullmatch(name)]
    given = {name: value for name, value in fields.items() if value is not None and name in known}
    try:
        return model.model_validate(given), unknown[:_MAX_IGNORED_NAMES]
    except ValidationError as error:
        raise invalid_body(error) from None


@dataclass(frozen=True)
class _Only(AfterValidator):
    harmless: tuple[object, ...]

    def __get_pydantic_json_schema__(self, schema: object, handler: object) -> JsonSchemaValue:
        return {"enum": [*self.harmless, None], "description": "Other values are not supported"}


def only(*harmless: object) -> AfterValidator:
    """For a known field that would change the answer and is not supported: just these values pass."""

    def check(value: object) -> object:
        # By type too: JSON's false is not the number 0.
        if not any(type(value) is type(other) and value == other for other in harmless):
            raise ValueError("is not supported by this server")
        return value

    return _Only(check, harmless)


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _name(value: str) -> str:
    if not is_name(value):
        raise ValueError("must be 1 to 128 letters, digits, or one of _ . : -")
    return value


def _list_of(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _few(stops: list[str]) -> list[str]:
    if len(stops) > _MAX_STOPS or sum(map(len, stops)) > _MAX_STOP_CHARS:
        raise ValueError(f"must be at most {_MAX_STOPS} strings, of {_MAX_STOP_CHARS} characters together")
    return stops


def _token_id(key: object) -> int:
    """JSON's keys are text."""
    if not _INTEGER.fullmatch(str(key)):
        raise ValueError("is not a token id")
    return int(str(key))


Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Harmless = Annotated[object, Field(description="Accepted; makes no difference")]
# Of a tool, or of a request.
Name = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"})]
Stop = Annotated[
    list[str],
    BeforeValidator(_list_of),
    AfterValidator(_few),
    WithJsonSchema(any_of(NON_EMPTY, {**list_of(NON_EMPTY), "maxItems": _MAX_STOPS})),
]
LogitBias = Annotated[
    dict[Annotated[int, BeforeValidator(_token_id)], float],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,18}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
