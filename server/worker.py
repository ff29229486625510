"""``python -m radixserve.server.worker``: one frontend process on the listening socket it inherits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator

import uvicorn

from radixserve.engine import lifeline
from radixserve.engine.errors import ConfigError
from radixserve.server.app import build_app

# Longer than what load balancers keep connections for, so that they close first.
_KEEP_ALIVE_S = 75
# What is still open this long after the drain is cut.
_LAST_SECONDS = 1


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the lifeline says when to leave."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> int:
    config = lifeline.read_config()
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    app = build_app(config, os.environ[lifeline.IPC_VARIABLE])
    server = _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
    )
    listener = socket.socket(fileno=int(os.environ[lifeline.LISTEN_FD_VARIABLE]))
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        loop = runner.get_loop()
        drains: set[asyncio.Task[None]] = set()

        async def drain(seconds: float) -> None:
            await app.state.frontend.drain(seconds)
            server.should_exit = True

        def on_drain(seconds: float) -> None:
            loop.call_soon_threadsafe(lambda: drains.add(loop.create_task(drain(seconds))))

        lifeline.watch(on_drain=on_drain)
        runner.run(server.serve(sockets=[listener]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"radixserve worker: {error}")
