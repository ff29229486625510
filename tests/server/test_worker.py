"""The worker process: on an inherited socket and a lifeline, without torch, and how it leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from radixserve.configs.schema import ServeConfig
from radixserve.engine import lifeline
from radixserve.tests.server.byte_model import write_byte_model
from radixserve.tests.server.fake_engine import FakeEngine, running_engine
from radixserve.tests.server.service import COMPLETIONS, wait_until


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    engine: FakeEngine
    url: str

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def leaves(self) -> tuple[int, str]:
        """Exit status and all that was printed."""
        assert self.process.stderr is not None
        return self.process.wait(15), self.process.stderr.read().decode()


@contextmanager
def running_worker(folder: Path, **options: Any) -> Iterator[Worker]:
    options.setdefault("model", str(write_byte_model(folder / "model")))
    config = ServeConfig(load_format="dummy", **options)
    address = f"ipc://{folder}/engine"
    with running_engine(address) as engine, socket.create_server(("127.0.0.1", 0)) as listener:
        fd = listener.fileno()
        with subprocess.Popen(
            [sys.executable, "-m", "radixserve.server.worker"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(fd,),
            env={**os.environ, lifeline.IPC_VARIABLE: address, lifeline.LISTEN_FD_VARIABLE: str(fd)},
        ) as process:
            worker = Worker(process, engine, f"http://127.0.0.1:{listener.getsockname()[1]}")
            listener.close()
            worker.tell(config.to_private_json())
            try:
                yield worker
            finally:
                process.kill()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def stream_in_thread(worker: Worker, body: dict[str, Any]) -> tuple[threading.Thread, list[str]]:
    received: list[str] = []

    def read() -> None:
        with httpx.stream("POST", f"{worker.url}{COMPLETIONS}", json={**body, "stream": True}, timeout=20) as stream:
            received.extend(line for line in stream.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: bool(worker.engine.running))
    return thread, received


def test_drain_lets_streams_end_and_refuses_new_work(folder: Path) -> None:
    with running_worker(folder) as worker:
        wait_until(lambda: is_ready(worker.url), 20)
        for interruption in (signal.SIGINT, signal.SIGTERM):
            worker.process.send_signal(interruption)
        thread, received = stream_in_thread(worker, {"prompt": "{slow}<<a>>", "ignore_eos": True, "max_tokens": 60})
        worker.tell("drain 10")
        wait_until(lambda: httpx.get(f"{worker.url}/health", timeout=5).json()["status"] == "draining")
        refused = httpx.post(f"{worker.url}{COMPLETIONS}", json={"prompt": "x"}, timeout=5)
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        thread.join(10)
        assert received[-1] == "data: [DONE]"
        status, errors = worker.leaves()
        assert status == 0
        assert "Traceback" not in errors


def test_drain_time_is_limited_and_ends_in_an_error(folder: Path) -> None:
    with running_worker(folder) as worker:
        wait_until(lambda: is_ready(worker.url), 20)
        thread, received = stream_in_thread(worker, {"prompt": "{slow}<<a>>", "ignore_eos": True})
        began = time.monotonic()
        worker.tell("drain 0.3")
        thread.join(10)
        assert json.loads(received[-1].removeprefix("data: "))["error"]["code"] == "draining"
        status, errors = worker.leaves()
        assert status == 0
        assert time.monotonic() - began < 5
        assert "Traceback" not in errors


def test_end_of_the_lifeline_is_the_end(folder: Path) -> None:
    with running_worker(folder) as worker:
        wait_until(lambda: is_ready(worker.url), 20)
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        assert worker.process.wait(5) == 0


def test_model_that_cannot_be_read_is_hopeless(folder: Path) -> None:
    with running_worker(folder, model=str(folder / "nowhere")) as worker:
        status, errors = worker.leaves()
        assert status == lifeline.EXIT_HOPELESS
        assert "nowhere" in errors
        assert "Traceback" not in errors


def test_the_log_names_us_as_the_source_of_keys_that_cannot_be_read(folder: Path) -> None:
    with running_worker(folder, api_key_file=str(folder / "nowhere")) as worker:
        status, errors = worker.leaves()
        assert status == lifeline.EXIT_HOPELESS
        assert "radixserve.server: cannot read the key file" in errors


def test_before_it_serves_an_order_to_drain_ends_it(folder: Path) -> None:
    with running_worker(folder) as worker:
        worker.tell("drain 30")
        assert worker.leaves() == (0, "")


def test_the_lifeline_is_obeyed_before_what_takes_long_is_imported() -> None:
    code = "import sys, radixserve.server.worker; print({'uvicorn', 'fastapi'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_frontend_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, radixserve.server.serving; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
