"""The FastAPI application of one frontend process, and its description (OpenAPI)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

from radixserve.configs.schema import ServeConfig
from radixserve.engine.messages import Submit
from radixserve.server.auth import ApiKeys, read_api_keys
from radixserve.server.engine_client import EngineClient
from radixserve.server.errors import HANDLERS, is_messages_path
from radixserve.server.frontend import Frontend
from radixserve.server.metrics import RequestObserver, WorkerNumbers
from radixserve.server.middleware import Gate, RequestIds
from radixserve.server.protocol.schemas import NON_EMPTY, NULL, STRING, record, tagged
from radixserve.server.request_log import RequestLine
from radixserve.server.routes import generate, metrics, operation, page, text
from radixserve.server.routes.common import IGNORED_HEADER, DirectRoute
from radixserve.server.tracing import RequestSpan, TraceParents, tracer_from

_PARTS = (generate, text, operation, metrics)


def build_app(config: ServeConfig, engine_address: str) -> FastAPI:
    """The application; it connects to the engine, and starts to load the tokenizer, when it is started up.

    Raises ``ConfigError`` when the file of API keys is wrong, or traces are wanted without their packages."""
    worker_numbers = WorkerNumbers(Path(engine_address.removeprefix("ipc://")).parent)
    tracer = tracer_from(os.environ)
    observers: list[Callable[[Submit], RequestObserver]] = [RequestLine] if config.log_requests else []
    if tracer is not None:
        observers.append(partial(RequestSpan, tracer))
    client = EngineClient(engine_address, config, worker_numbers.numbers, observers)
    frontend = Frontend(config, client, worker_numbers)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await frontend.start()
        try:
            yield
        finally:
            await frontend.close()

    app = FastAPI(title="radixserve", version=version("radixserve"), lifespan=lifespan, exception_handlers=HANDLERS)
    app.state.frontend = frontend
    # First of all routes, in this order, and not included as routers, which are asked twice for each request.
    app.router.routes[:0] = [r for part in _PARTS for r in part.router.routes]
    keys = read_api_keys(config)
    if config.page != "off":
        app.router.routes += page.routes(frontend, config, keys)
    _add_layers(app, config, keys)
    if tracer is not None:
        app.add_middleware(TraceParents)
    # FastAPI's documented way to describe an application otherwise.
    app.openapi = cache(lambda: _describe(app, generate.STREAMING_PATHS))  # type: ignore[method-assign]
    return app


def _add_layers(app: FastAPI, config: ServeConfig, keys: ApiKeys) -> None:
    """The last one added is the outermost."""
    app.add_middleware(Gate, keys=keys, max_body_bytes=config.max_body_bytes)
    if config.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", IGNORED_HEADER],
        )
    app.add_middleware(RequestIds, log_refusals=config.log_requests)


# ---- the OpenAPI document: FastAPI's, with our schemas of bodies and the one shape of all errors ----

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


def _describe(app: FastAPI, streaming_paths: Iterable[str]) -> dict[str, Any]:
    """``streaming_paths``: routes whose answer may be an event stream."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    # FastAPI's own form of validation errors never leaves this server.
    schemas = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    for body in [route.body_model for route in app.routes if isinstance(route, DirectRoute) and route.body_model]:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {}) | {body.__name__: _with_nulls(schema)}
    document["components"] = {"schemas": schemas}
    for path, methods in document["paths"].items():
        for described in methods.values():
            responses = described["responses"]
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
