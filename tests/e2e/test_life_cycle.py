"""Starting, dying and stopping: health is honest, clients get an end, and no process stays behind."""

import json
import os
import signal
import socket
import time

import httpx
import pytest

from radixserve.tests.e2e.server_process import running_server

LONG = {
    "prompt": "Once upon a time",
    "max_tokens": 3000,
    "ignore_eos": True,
    "stream": True,
}


def _gone(pids: list[int], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_port_listens_and_health_says_loading_before_the_model_is_there() -> None:
    with running_server(wait=False) as server:
        port = int(server.url.rsplit(":", 1)[1])
        deadline = time.monotonic() + 5
        while not _listens(port):
            assert time.monotonic() < deadline, "the port must listen from the first second"
            time.sleep(0.05)
        early = server.health()
        assert early.status_code == 503
        assert "loading" in early.text
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi"}, timeout=10)
        assert refused.status_code == 503
        server.wait_ready()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_lets_streams_end_and_leaves_no_process(
    signal_number: signal.Signals,
) -> None:
    with running_server() as server:
        pids = [server.process.pid, *server.children()]
        body = {**LONG, "max_tokens": 60}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.killpg(server.process.pid, signal_number)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(15) == 0
        assert _gone(pids)


def test_second_signal_stops_at_once() -> None:
    with running_server() as server:
        pids = [server.process.pid, *server.children()]
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as stream:
            next(stream.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            time.sleep(1)
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(5)
        assert _gone(pids, 5)


def test_killed_supervisor_leaves_no_orphan() -> None:
    with running_server() as server:
        pids = server.children()
        assert len(pids) >= 2
        server.process.kill()
        assert _gone(pids)


def test_missing_model_ends_with_a_remedy_and_not_with_a_restart_loop() -> None:
    with running_server("--model", "/no/such/folder", "--log-format", "json", wait=False) as server:
        assert server.process.wait(60) == 1
        lines = [json.loads(line) for line in server.log().splitlines()]  # what people are told included
    assert "radixserve listens on" in lines[0]["message"]
    assert any("/no/such/folder" in line["message"] for line in lines if line["level"] == "error")
    assert not any("traceback" in line for line in lines)
