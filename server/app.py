"""The FastAPI application of one frontend process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from radixserve.configs.schema import ServeConfig
from radixserve.engine.messages import Submit
from radixserve.server.auth import ApiKeys, read_api_keys
from radixserve.server.engine_client import EngineClient
from radixserve.server.errors import HANDLERS
from radixserve.server.frontend import Frontend
from radixserve.server.metrics import RequestObserver, WorkerNumbers
from radixserve.server.middleware import Gate, RequestIds
from radixserve.server.openapi import describe
from radixserve.server.request_log import RequestLine
from radixserve.server.routes import generate, metrics, operation, page, text
from radixserve.server.routes.common import IGNORED_HEADER
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
    app.openapi = cache(lambda: describe(app, generate.STREAMING_PATHS))  # type: ignore[method-assign]
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
