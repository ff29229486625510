"""A frontend on a real socket (uvicorn in a thread) before a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from radixserve.configs.schema import ServeConfig
from radixserve.server.app import build_app
from radixserve.server.connection import Connection, ConnectionLimits
from radixserve.server.frontend import Frontend
from radixserve.tests.server.byte_model import write_byte_model
from radixserve.tests.server.fake_engine import FakeEngine, running_engine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Service:
    url: str
    engine: FakeEngine
    frontend: Frontend

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        wait_until(condition, timeout_s)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@contextlib.contextmanager
def running_frontend(
    config: ServeConfig,
    engine_address: str,
    protocol: Callable[..., asyncio.Protocol] = partial(Connection, limits=ConnectionLimits()),  # noqa: B008
) -> Iterator[tuple[str, Frontend]]:
    app = build_app(config, engine_address)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)  # so that slow readers are noticed
        server = uvicorn.Server(
            uvicorn.Config(app, loop="uvloop", http=protocol, ws="none", log_config=None, timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.frontend
        finally:
            server.should_exit = True
            thread.join(5)


@contextlib.contextmanager
def running_service(
    folder: Path, *, phase: str = "ready", wait: bool = True, limits: ConnectionLimits | None = None, **options: Any
) -> Iterator[Service]:
    """``options`` of ``ServeConfig``; the model is the byte model unless they name another."""
    options.setdefault("load_format", "dummy")
    options.setdefault("served_model_name", ("tiny",))
    model = options.pop("model", None) or str(write_byte_model(folder / "model"))
    address = f"ipc://{folder}/engine"
    with running_engine(address, phase) as engine:
        config = ServeConfig(model=model, **options)
        protocol = partial(Connection, limits=limits or ConnectionLimits())
        with running_frontend(config, address, protocol) as (url, frontend):
            if wait:
                wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
            yield Service(url, engine, frontend)
