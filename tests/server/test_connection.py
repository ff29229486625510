"""What one connection may do beyond a request and its answer."""

import json
import socket
import time
from typing import Any

import pytest

from radixserve.tests.server.service import COMPLETIONS, Service, wait_until

UPGRADE = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


def request_bytes(body: dict[str, Any], headers: str = "") -> bytes:
    content = json.dumps(body)
    return (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n{headers}\r\n{content}".encode()
    )


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
    with socket.create_connection(service.address, timeout=10) as client:
        for text in ("one", "two"):
            sent = request_bytes({"prompt": f"<<{text}>>"}, UPGRADE)
            for start in range(0, len(sent), piece):
                client.sendall(sent[start : start + piece])
            assert answer(client) == text
        client.sendall(request_bytes({"prompt": "<<three>>"}))
        assert answer(client) == "three"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_request_being_answered_and_those_behind_it(
    service: Service, stream: bool, late: bool
) -> None:
    ids = [f"pipelined-{stream}-{late}-{i}" for i in range(3)]
    client = socket.create_connection(service.address, timeout=10)
    for request_id in ids:
        body = {"prompt": "{silent}", "ignore_eos": True, "stream": stream, "request_id": request_id}
        client.sendall(request_bytes(body))
        if late:  # what comes now finds an answer under way
            wait_until(lambda: any(r.submit.request_id == ids[0] for r in list(service.engine.running.values())))
            time.sleep(0.05)
    wait_until(lambda: any(r.submit.request_id == ids[0] for r in list(service.engine.running.values())))
    client.close()
    wait_until(lambda: ids[0] in service.engine.aborted)
    wait_until(lambda: service.frontend.num_active == 0 and service.frontend.client.num_open == 0)
    assert not {submit.request_id for submit in service.engine.submits} & {*ids[1:]}
