"""Start the real server as a user would, on a free port, and stop it again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil


@dataclass
class RunningServer:
    """A live server: ``url``, its supervisor ``process`` and the file that its output goes to."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=10)

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = httpx.get(f"{self.url}/server_info", timeout=10).json()["stats"]
        return stats

    def engine_pid(self) -> int:
        return int(httpx.get(f"{self.url}/server_info", timeout=10).json()["engine_pid"])

    def wait_ready(self, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server left with {self.process.returncode}:\n{self.log()}")
            try:
                if self.health().status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"the server is not ready after {timeout_s} s:\n{self.log()}")

    def wait_idle(self, timeout_s: float = 20.0) -> dict[str, int]:
        """Wait until nothing runs or waits and every page is free or in the tree; return the stats."""
        deadline = time.monotonic() + timeout_s
        while True:
            stats = self.stats()
            held = stats["kv_total_tokens"] - stats["kv_free_tokens"] - stats["kv_evictable_tokens"]
            if stats["running"] == 0 and stats["waiting"] == 0 and held == 0:
                return stats
            if time.monotonic() > deadline:
                raise AssertionError(f"still busy after {timeout_s} s: {stats}, held {held}")
            time.sleep(0.1)

    def children(self) -> list[int]:
        """Pids of all descendants of the supervisor."""
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(*flags: str, wait: bool = True, output: str | None = None) -> Iterator[RunningServer]:
    """Run ``radixserve serve`` with ``flags``; on leaving it is asked to stop and, if it will not, killed. What it
    writes goes to the file ``output`` (default: a temporary one)."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(output or Path(folder) / "server.log")
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "radixserve.server.cli", "serve", f"--port={port}", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
            server = RunningServer(f"http://127.0.0.1:{port}", process, log_path)
            try:
                if wait:
                    server.wait_ready()
                yield server
            finally:
                stop(process)


def stop(process: subprocess.Popen[bytes], grace_s: float = 15.0) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
