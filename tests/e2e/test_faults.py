"""Faults done to a real server with a tiny model: whoever was hurt is told, the others go on, nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from radixserve.tests.e2e.server_process import RunningServer, running_server
from radixserve.tests.server.byte_model import write_byte_model

LONG = {"prompt": "x", "ignore_eos": True, "max_tokens": 20_000}
SHORT = {"prompt": "hello", "ignore_eos": True, "max_tokens": 4}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_byte_model(tmp_path_factory.mktemp("tiny") / "model")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 32_768}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path) -> Iterator[RunningServer]:
    """One server for all faults, whose log is on a full disk; in the end nothing of it may be left."""
    shared_before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="rs-") as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        flags = ("--model", str(tiny_model), "--load-format=dummy", "--health-timeout=1", "--watchdog-timeout=2")
        with running_server(*flags, output="/dev/full") as server:
            yield server
            pids = [server.process.pid, *server.children()]
            server.process.terminate()
            assert server.process.wait(20) == 0
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        assert os.listdir(runtime) == []
    assert set(os.listdir("/dev/shm")) <= shared_before


class Client(threading.Thread):
    """A long stream: ``end`` is its last event, or the error that cut it off."""

    def __init__(self, server: RunningServer):
        super().__init__(daemon=True)
        self._url = server.url
        self.started, self.end, self.ended_at = threading.Event(), "", 0.0
        self.start()
        assert self.started.wait(20)

    def run(self) -> None:
        try:
            body = {**LONG, "stream": True}
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as stream:
                for line in stream.iter_lines():
                    self.started.set()
                    self.end = line or self.end
        except httpx.TransportError as error:
            self.end = repr(error)
        self.ended_at = time.monotonic()


def long_streams(server: RunningServer) -> list[Client]:
    return [Client(server) for _ in range(3)]


def answers_again(server: RunningServer) -> None:
    server.wait_ready(60)
    assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=20).status_code == 200
    stats = server.wait_idle()
    assert stats["kv_free_tokens"] + stats["kv_evictable_tokens"] == stats["kv_total_tokens"]


def test_an_engine_that_is_killed_in_mid_stream(tiny_server: RunningServer) -> None:
    engine, clients = tiny_server.engine_pid(), long_streams(tiny_server)
    os.kill(engine, signal.SIGKILL)
    killed_at = time.monotonic()
    for client in clients:
        client.join(10)
        assert client.ended_at - killed_at < 5
        assert json.loads(client.end.removeprefix("data: "))["error"]["code"] == "engine_dead"
    answers_again(tiny_server)
    assert tiny_server.engine_pid() != engine


def test_a_worker_that_dies_in_mid_stream(tiny_server: RunningServer) -> None:
    worker = int(httpx.get(f"{tiny_server.url}/server_info").json()["worker_pid"])
    engine, clients = tiny_server.engine_pid(), long_streams(tiny_server)
    os.kill(worker, signal.SIGKILL)
    for client in clients:
        client.join(5)
        assert "Error" in client.end, "its connection is cut"
    answers_again(tiny_server)
    assert tiny_server.engine_pid() == engine


def test_an_engine_that_hangs(tiny_server: RunningServer) -> None:
    engine, clients = tiny_server.engine_pid(), long_streams(tiny_server)
    os.kill(engine, signal.SIGSTOP)
    reasons = set()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(engine) and time.monotonic() < deadline:
        health = tiny_server.health()
        if health.status_code == 503:
            reasons.add(health.json()["status"])
        time.sleep(0.1)
    gone_at = time.monotonic()
    assert "stuck" in reasons
    for client in clients:
        client.join(10)
        assert client.ended_at - gone_at < 5
        assert "engine_dead" in client.end
    answers_again(tiny_server)
    assert tiny_server.engine_pid() != engine


def test_an_engine_without_memory(tiny_server: RunningServer) -> None:
    """Nothing more can be allocated: each request has an end all the same, and so has the trouble."""
    engine = psutil.Process(tiny_server.engine_pid())
    engine.rlimit(psutil.RLIMIT_AS, (engine.memory_info().vms, -1))
    clients = [Client(tiny_server) for _ in range(4)]
    prompts = [[[i % 200] * 400] for i in range(20)]
    statuses = set()
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 50, "ignore_eos": True, "logprobs": 5}
        statuses.add(httpx.post(f"{tiny_server.url}/v1/completions", json=body, timeout=30).status_code)
    assert statuses <= {200, 500, 503}
    for client in clients:
        client.join(30)
        assert client.end == "data: [DONE]" or "error" in client.end
    if engine.is_running():
        engine.rlimit(psutil.RLIMIT_AS, (-1, -1))
    answers_again(tiny_server)
