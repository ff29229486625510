"""Short names for the JSON schemas in the API's description, of what pydantic does not take apart by itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
NON_EMPTY: Schema = {"type": "string", "minLength": 1}
JSON_TEXT: Schema = {"type": "string", "contentMediaType": "application/json"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
_NONE: Mapping[str, Schema] = MappingProxyType({})


def record(optional: Mapping[str, Schema] = _NONE, /, **required: Schema) -> Schema:
    """An object that has the ``required`` fields, and may have the ``optional`` ones."""
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def tagged(kind: str, optional: Mapping[str, Schema] = _NONE, /, **required: Schema) -> Schema:
    """A ``record`` that is told from others by its field ``type``."""
    return record(optional, type={"const": kind}, **required)


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def list_of(*items: Schema, at_least: int = 0) -> Schema:
    """An array; each item is any of ``items``."""
    array: Schema = {"type": "array", "items": any_of(*items) if len(items) > 1 else items[0]}
    return array | {"minItems": at_least} if at_least else array
