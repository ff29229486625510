"""Clients that go away, in every phase: their requests end in the engine, and nobody else notices."""

import json
import socket
import time
from typing import Any

import httpx
import pytest

from radixserve.tests.server.clients import connect, request_bytes, vanish
from radixserve.tests.server.service import CHAT, COMPLETIONS, Service, running_service, wait_until

LONG = "{slow}<<a>>"
SILENT = "{silent}"


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [SILENT, LONG])
def test_vanished_client_is_aborted(service: Service, how: str, stream: bool, prompt: str) -> None:
    request_id = f"gone-{how}-{stream}-{prompt[1:5]}"
    body = {"prompt": prompt, "ignore_eos": True, "stream": stream, "request_id": request_id, "n": 2}
    client = connect(service)
    client.sendall(request_bytes(COMPLETIONS, body))
    wait_until(lambda: sum(r.submit.request_id == request_id for r in list(service.engine.running.values())) == 2)
    if stream and prompt == LONG:
        assert client.recv(10)
    vanish(client, how)
    wait_until(lambda: service.engine.aborted.count(request_id) == 2)
    wait_until(lambda: service.frontend.num_active == 0 and service.frontend.client.num_open == 0)


def test_client_that_leaves_while_sending_its_body_reaches_no_engine(service: Service) -> None:
    before = len(service.engine.submits)
    client = connect(service)
    client.sendall(request_bytes(COMPLETIONS, {"prompt": "x" * 1000})[:-10])
    time.sleep(0.05)
    client.close()
    time.sleep(0.1)
    assert len(service.engine.submits) == before
    assert service.frontend.num_active == 0


def test_storm_of_vanishing_clients_leaves_nothing(service: Service, http: httpx.Client) -> None:
    for i in range(60):
        client = connect(service)
        client.sendall(request_bytes(CHAT, {"messages": [{"role": "user", "content": LONG}], "stream": i % 2 == 0}))
        if i % 3:
            time.sleep(0.002 * (i % 7))
        vanish(client, "RST" if i % 4 else "FIN")
    wait_until(lambda: service.frontend.num_active == 0)
    wait_until(lambda: service.frontend.client.num_open == 0 and not service.engine.running)
    assert http.post(COMPLETIONS, json={"prompt": "<<ok>>"}).json()["choices"][0]["text"] == "ok"


def test_slow_reader_gets_everything_in_larger_chunks(service: Service) -> None:
    """Reads nothing until the engine is done, from a socket with little room: then text has gathered."""
    body = {"prompt": ["<<" + "é" * 40 + ">>"] * 64, "ignore_eos": True, "max_tokens": 400, "stream": True}
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(service.address)
    client.settimeout(20)
    client.sendall(request_bytes(COMPLETIONS, body))
    wait_until(lambda: service.frontend.client.num_open > 0)
    wait_until(lambda: service.frontend.client.num_open == 0, 30)
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += client.recv(1 << 16)
    client.close()
    blocks = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    texts = [json.loads(block[6:])["choices"][0]["text"] for block in blocks]
    assert "".join(texts).count("é") == 64 * 200
    assert max(map(len, texts)) > 3


@pytest.mark.parametrize(
    ("own_id", "given"), [("kill-me", "chatcmpl-kill-me"), ("kill-me", "kill-me"), ("msg_kill-me", "msg_kill-me")]
)
def test_request_is_aborted_by_its_id(own_id: str, given: str, service: Service, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "ignore_eos": True, "stream": True}
    with http.stream("POST", CHAT, json={**body, "request_id": own_id}) as stream:
        lines = stream.iter_lines()
        next(lines)
        with httpx.Client(base_url=service.url, timeout=10) as other:
            for nobodys in ("cmpl-", "other"):  # no id must be taken for all of them
                assert other.post("/abort_request", json={"request_id": nobodys}).status_code == 200
            time.sleep(0.05)
            assert service.engine.running
            assert other.post("/abort_request", json={"request_id": given}).status_code == 200
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_aborted"
    assert http.post("/abort_request", json={}).status_code == 400


def test_big_bodies_do_not_hold_up_others(service: Service) -> None:
    """Health answers while megabytes are parsed and refused."""
    import threading

    text = "word " * 1_000_000
    answers: list[int] = []

    def send() -> None:
        body = {"messages": [{"role": "user", "content": text}]}
        answers.append(httpx.post(f"{service.url}{CHAT}", json=body, timeout=60).status_code)

    senders = [threading.Thread(target=send) for _ in range(4)]
    for sender in senders:
        sender.start()
    with httpx.Client(base_url=service.url, timeout=5) as probe:
        while any(sender.is_alive() for sender in senders):
            assert probe.get("/health").status_code == 200
            time.sleep(0.01)
    assert answers == [400] * 4


def test_too_large_body_is_refused_and_the_connection_lives(service: Service) -> None:
    with httpx.Client(base_url=service.url, timeout=30) as client:
        answer = client.post(COMPLETIONS, content=b" " * (9 * 2**20))
        assert answer.status_code == 413
        assert "8 MiB" in answer.json()["error"]["message"]
        chunked = client.post(COMPLETIONS, content=(b" " * 2**20 for _ in range(9)))
        assert chunked.status_code == 413
        assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


def test_quiet_streams_get_comments(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixserve.server.generation.QUIET_S", 0.05)
    monkeypatch.setattr("radixserve.server.routes.generate.FIRST_WORD_S", 0.05)
    with running_service(folder) as service:
        body = {"prompt": SILENT, "stream": True}
        with httpx.stream("POST", f"{service.url}{COMPLETIONS}", json=body, timeout=10) as stream:
            assert stream.status_code == 200
            lines = [line for _, line in zip(range(5), stream.iter_lines(), strict=False)]
        assert lines == [": keep-alive", "", ": keep-alive", "", ": keep-alive"]
