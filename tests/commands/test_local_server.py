"""``chat`` without a URL: the server it starts is ready when the first answer is asked for, and never outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from radixserve.tests.server.byte_model import write_byte_model


@contextmanager
def local_chat(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A chat with random weights that has answered once, and all processes below it."""
    model = str(write_byte_model(folder / "model"))
    command = [sys.executable, "-m", "radixserve.server.cli", "chat", model, "--max-tokens", "2"]
    serve = ["--load-format", "dummy", "--num-pages", "32"]
    with subprocess.Popen(
        [*command, "--", *serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write("hello\n/stats\n")
            process.stdin.flush()
            while "tokens/s" not in (line := process.stdout.readline()):
                assert line, process.stderr.read() if process.stderr else ""
            yield process, psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()


def test_the_server_ends_with_the_conversation(folder: Path) -> None:
    with local_chat(folder) as (process, below):
        assert len(below) == 3  # supervisor, engine, worker
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    assert psutil.wait_procs(below, timeout=5)[1] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_when_the_chat_is_killed(folder: Path, number: signal.Signals) -> None:
    with local_chat(folder) as (process, below):
        process.send_signal(number)
        assert psutil.wait_procs(below, timeout=30)[1] == []
