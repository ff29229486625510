"""The OpenAPI document: FastAPI's, with our schemas of bodies and the one shape of all errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from radixserve.server.errors import is_messages_path
from radixserve.server.protocol.schemas import NON_EMPTY, NULL, STRING, record, tagged
from radixserve.server.routes.common import DirectRoute

_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERROR = record(
    error=record(
        message=NON_EMPTY,
        type=STRING,
        param={**_NULLABLE_TEXT, "description": "The field at fault, as a path: messages[0].role"},
        code={**_NULLABLE_TEXT, "description": "For programs: context_length_exceeded, queue_full, ..."},
    )
)
_MESSAGES_ERROR = tagged("error", error=record(type=STRING, message=NON_EMPTY))
# Without a type: readers of this document see a string, or the events in it.
_EVENT_STREAM = {
    "text/event-stream": {"schema": {"description": "Events, each with JSON; then, of completions, [DONE]"}}
}


def describe(app: FastAPI, streaming_paths: Iterable[str]) -> dict[str, Any]:
    """``streaming_paths``: routes whose answer may be an event stream."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    # FastAPI's own form of validation errors never leaves this server.
    schemas = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    for body in [route.body_model for route in app.routes if isinstance(route, DirectRoute) and route.body_model]:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {}) | {body.__name__: _with_nulls(schema)}
    document["components"] = {"schemas": schemas}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["default"] = _fault("MessagesError" if is_messages_path(path) else "Error")
            if path in streaming_paths:
                responses["200"]["content"] |= _EVENT_STREAM
    return document


def _fault(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": "The request was wrong or could not be served", "content": content}


def _with_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """A null in a body is the same as no field, so every optional field may be null."""
    required = schema.get("required", [])
    fields = {
        name: field if name in required else _or_null(field) for name, field in schema.get("properties", {}).items()
    }
    return schema | {"properties": fields}


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {key: field[key] for key in ("description", "title", "default") if key in field}
    kind = {key: value for key, value in field.items() if key not in kept}
    choices = kind["anyOf"] if set(kind) == {"anyOf"} else [kind]
    if not kind or NULL in choices or None in kind.get("enum", ()):
        return field
    return {"anyOf": [*choices, NULL], **kept}
