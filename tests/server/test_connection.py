"""What one connection may do beyond a request and its answer."""

import json
import socket
import time

import pytest

from radixserve.tests.server.clients import chunks_in, connect, request_bytes
from radixserve.tests.server.service import COMPLETIONS, Service, wait_until

UPGRADE = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


def answer(client: socket.socket) -> str:
    """The text of the next answer."""
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
        part = client.recv(65536)
        assert part, "the connection was closed"
        data += part
    assert data.startswith(b"HTTP/1.1 200")
    text: str = json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    return text


@pytest.mark.parametrize("piece", [1 << 20, 150, 7])
def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one(service: Service, piece: int) -> None:
    with connect(service) as client:
        for text in ("one", "two"):
            sent = request_bytes(COMPLETIONS, {"prompt": f"<<{text}>>"}, UPGRADE)
            for start in range(0, len(sent), piece):
                client.sendall(sent[start : start + piece])
            assert answer(client) == text
        client.sendall(request_bytes(COMPLETIONS, {"prompt": "<<three>>"}))
        assert answer(client) == "three"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_request_being_answered_and_those_behind_it(
    service: Service, stream: bool, late: bool
) -> None:
    ids = [f"pipelined-{stream}-{late}-{i}" for i in range(3)]
    client = connect(service)
    for request_id in ids:
        body = {"prompt": "{silent}", "ignore_eos": True, "stream": stream, "request_id": request_id}
        client.sendall(request_bytes(COMPLETIONS, body))
        if late:  # what comes now finds an answer under way
            wait_until(lambda: any(r.submit.request_id == ids[0] for r in list(service.engine.running.values())))
            time.sleep(0.05)
    wait_until(lambda: any(r.submit.request_id == ids[0] for r in list(service.engine.running.values())))
    client.close()
    wait_until(lambda: ids[0] in service.engine.aborted)
    wait_until(lambda: service.frontend.num_active == 0 and service.frontend.client.num_open == 0)
    assert not {submit.request_id for submit in service.engine.submits} & {*ids[1:]}


@pytest.mark.parametrize("path", ["/metrics", "/health"])
def test_http_1_0_clients_get_plain_answers_that_end_with_the_connection(service: Service, path: str) -> None:
    head, body = whole_answer(service, f"GET {path} HTTP/1.0\r\nconnection: keep-alive\r\n\r\n".encode())
    assert "connection: close" in head and "chunked" not in head
    assert body.startswith(b"# HELP" if path == "/metrics" else b'{"status"')


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_clients_get_streams_without_chunks(service: Service, stream: bool) -> None:
    request = request_bytes(COMPLETIONS, {"prompt": "<<one two three>>", "stream": stream}).replace(
        b"HTTP/1.1", b"HTTP/1.0"
    )
    head, body = whole_answer(service, request)
    assert head.startswith("http/1.1 200") and "connection: close" in head
    assert "transfer-encoding" not in head and ("content-length" in head) == (not stream)
    if not stream:
        assert json.loads(body)["choices"][0]["text"] == "one two three"
        return
    pieces = chunks_in(body.decode())
    assert len(pieces) > 3
    assert "".join(choice["text"] for piece in pieces for choice in piece["choices"]) == "one two three"


def whole_answer(service: Service, request: bytes) -> tuple[str, bytes]:
    """Head, in lower case, and body of what comes until the server closes."""
    with connect(service) as client:
        client.sendall(request)
        data = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    return head.decode().lower(), body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_stops_sending_is_taken_for_gone(service: Service, stream: bool) -> None:
    """As after a close: nothing on the wire tells the two apart."""
    request_id = f"half-closed-{stream}"
    body = {"prompt": "{silent}", "ignore_eos": True, "stream": stream, "request_id": request_id}
    with connect(service) as client:
        client.sendall(request_bytes(COMPLETIONS, body))
        wait_until(lambda: any(r.submit.request_id == request_id for r in list(service.engine.running.values())))
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: request_id in service.engine.aborted)
        while client.recv(65536):
            pass  # the server closes, rather than keep the client waiting
