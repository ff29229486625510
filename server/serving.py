"""What a worker does once all is imported: uvicorn and the application on the listening socket it inherits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from radixserve.configs.schema import ServeConfig
from radixserve.engine import lifeline
from radixserve.engine.errors import ConfigError
from radixserve.server.app import build_app
from radixserve.server.connection import Connection, ConnectionLimits
from radixserve.server.frontend import Frontend

# Longer than what load balancers keep connections for, so that they close first.
_KEEP_ALIVE_S = 75
# Kept free for sockets and files that are no connections.
_OTHER_FILES = 256
# What is still open this long after the drain is cut.
_LAST_SECONDS = 1
# Requests leave few cycles behind: Python's own figures (700, 10, 10) made a quarter of a short request's cost.
_GC_THRESHOLDS = (20_000, 20, 50)

_log = logging.getLogger("radixserve.server")

# Takes what is to be called, from any thread, with the seconds that running requests get.
OnDrain = Callable[[Callable[[float], object]], None]


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the lifeline says when to leave."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServeConfig, on_drain: OnDrain) -> int:
    """Serve until we are told to leave. Returns the exit status."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        app = build_app(config, os.environ[lifeline.IPC_VARIABLE])
    except ConfigError as error:
        _log.error("%s", error)
        return lifeline.EXIT_HOPELESS
    server = _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=partial(Connection, limits=_limits(config)),  # type: ignore[arg-type]  # called like the class
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
    )
    gc.collect()
    gc.freeze()  # what was imported stays, and need not be looked through again and again
    gc.set_threshold(*_GC_THRESHOLDS)
    listener = socket.socket(fileno=int(os.environ[lifeline.LISTEN_FD_VARIABLE]))
    frontend: Frontend = app.state.frontend
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, listener, frontend, on_drain))
    return lifeline.EXIT_HOPELESS if frontend.failed.is_set() else 0


def _limits(config: ServeConfig) -> ConnectionLimits:
    """Those of the configuration, within the files that the system lets us open."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConnectionLimits(
        max_connections=max(1, min(config.max_connections, open_files - _OTHER_FILES)),
        max_body_bytes=config.max_body_bytes,
        request_s=config.request_timeout,
    )


async def _serve(server: _Server, listener: socket.socket, frontend: Frontend, on_drain: OnDrain) -> None:
    loop = asyncio.get_running_loop()

    async def drain(seconds: float) -> None:
        await frontend.drain(seconds)
        server.should_exit = True

    async def leave_when_failed() -> None:
        await frontend.failed.wait()
        server.should_exit = True

    tasks = [loop.create_task(leave_when_failed())]
    on_drain(lambda seconds: loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(drain(seconds)))))
    await server.serve(sockets=[listener])
