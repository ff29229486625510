"""The engine process: heartbeats while it loads, and how it ends when it cannot."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from radixserve.engine import lifeline
from radixserve.engine.messages import EngineStatus, FinishReason, Hello, Outputs, Rejected, Submit, ToFrontend
from radixserve.engine.sampling_params import SamplingParams

SUBMIT = Submit(1, "r", np.array([1, 2, 3], "<i4").tobytes(), SamplingParams(max_tokens=4, ignore_eos=True))


@contextmanager
def engine_process(tmp_path: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], "zmq.Socket[bytes]"]]:
    address = f"ipc://{tmp_path}/engine"
    script = Path(__file__).with_name("fake_engine_process.py")
    process = subprocess.Popen([sys.executable, script, address, how], stderr=subprocess.PIPE, text=True)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    socket.send(msgspec.msgpack.encode(Hello(os.getpid())))
    try:
        yield process, socket
    finally:
        process.kill()
        process.communicate()
        socket.close()
        context.term()


def receive(socket: "zmq.Socket[bytes]", timeout_s: float = 20.0) -> ToFrontend:
    assert socket.poll(int(1000 * timeout_s)), "no message"
    return msgspec.msgpack.decode(socket.recv(), type=ToFrontend)


def test_loading_is_told_then_requests_are_served(tmp_path: Path) -> None:
    with engine_process(tmp_path, "ready") as (process, socket):
        first = receive(socket)
        assert isinstance(first, EngineStatus) and (first.phase, first.pid) == ("loading", process.pid)
        socket.send(msgspec.msgpack.encode(SUBMIT))
        seen: list[ToFrontend] = []
        while not (seen and isinstance(seen[-1], EngineStatus) and seen[-1].phase == "ready"):
            seen.append(receive(socket))
        assert [(m.uid, m.status) for m in seen if isinstance(m, Rejected)] == [(1, 503)]
        loading = [m.progress for m in seen if isinstance(m, EngineStatus) and m.phase == "loading"]
        assert len(loading) >= 2 and loading == sorted(loading) and loading[-1] > 0
        socket.send(msgspec.msgpack.encode(SUBMIT))
        events = []
        while not (events and events[-1].finish):
            message = receive(socket)
            events += message.each() if isinstance(message, Outputs) else []
        assert events[-1].finish is FinishReason.LENGTH and len(events) == 4


@pytest.mark.parametrize(("how", "status", "text"), [("no-model", 3, "download the model"), ("crash", 1, "a bug")])
def test_an_engine_that_cannot_load_says_why_and_how_it_ended(tmp_path: Path, how: str, status: int, text: str) -> None:
    with engine_process(tmp_path, how) as (process, socket):
        _, errors = process.communicate(timeout=30)
        assert process.returncode == status
        assert text in errors
        assert ("Traceback" in errors) is (how == "crash")
        phases = {}
        while socket.poll(0):
            message = receive(socket)
            if isinstance(message, EngineStatus):
                phases[message.phase] = message.detail
        assert ("failed" in phases) is (how == "no-model")
        assert text in phases.get("failed", text)


def test_without_a_supervisor_the_process_says_so() -> None:
    command = [sys.executable, "-m", "radixserve.engine.process"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "radixserve serve" in done.stderr and "Traceback" not in done.stderr


def test_scheduler_and_loop_load_no_torch() -> None:
    code = "import sys, radixserve.engine.process; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_people_are_told_what_is_ready_and_how_to_use_it(tmp_path: Path) -> None:
    script = Path(__file__).with_name("fake_engine_process.py")
    command = [sys.executable, script, f"ipc://{tmp_path}/engine", "ready"]
    environment = {**os.environ, lifeline.URL_VARIABLE: "http://host:1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        process.kill()
    assert lines[:3] == ["radixserve is ready\n", "  a fake\n", "  page at http://host:1/\n"]
    assert lines[3].startswith("  curl http://host:1/v1/chat/completions ")


def test_a_deadlocked_engine_is_silent_and_tells_where_it_hangs_when_it_is_aborted(tmp_path: Path) -> None:
    with engine_process(tmp_path, "deadlock") as (process, socket):
        while not (isinstance(status := receive(socket), EngineStatus) and status.phase == "ready"):
            pass
        socket.send(msgspec.msgpack.encode(SUBMIT))
        while socket.poll(1500):  # heartbeats come twice a second
            socket.recv()
        process.send_signal(signal.SIGABRT)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == -signal.SIGABRT
        assert "in hang" in errors and "in advance" in errors
