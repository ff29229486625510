"""Starts the server that a benchmark measures, and ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

_LEAVE_S = 15


@contextmanager
def running_server(command: Sequence[str], start_s: float, log: Path | None = None) -> Iterator[str]:
    """The URL of a server once it is healthy, for which it gets ``start_s`` seconds; what it writes goes to ``log``.
    In ``command``, {port} stands for a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with open(log or os.devnull, "w") as output:
        words = [word.replace("{port}", str(port)) for word in command]
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_ready(url, process, time.monotonic() + start_s)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(url: str, process: subprocess.Popen[bytes], deadline: float) -> None:
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"no server at {url}: {process.args}")
