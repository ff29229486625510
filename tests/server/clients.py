"""How clients of these tests send requests on bare sockets, leave, and read event streams."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import httpx

from radixserve.tests.server.service import Service


def connect(service: Service) -> socket.socket:
    return socket.create_connection(service.address, timeout=10)


def request_bytes(path: str, body: dict[str, Any], headers: str = "") -> bytes:
    content = json.dumps(body)
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n{headers}\r\n{content}".encode()


def vanish(client: socket.socket, how: str) -> None:
    if how == "RST":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def chunks_in(text: str) -> list[dict[str, Any]]:
    """Of a stream that ends well."""
    *blocks, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def streamed_chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What is streamed for ``body``."""
    answer = _streamed(http, path, body)
    assert answer.status_code == 200
    return chunks_in(answer.text)


def named_events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What is streamed for ``body`` where each event has its type as its name."""
    found = []
    for block in _streamed(http, path, body).text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def _streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = http.post(path, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer
