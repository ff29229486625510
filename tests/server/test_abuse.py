"""Clients that mean harm or are broken: they get their due, in bounded time and memory, and the others are served."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from radixserve.engine.text.tokenizer import Tokenizer
from radixserve.server.connection import ConnectionLimits
from radixserve.tests.server.service import CHAT, COMPLETIONS, Service, running_service, wait_until

HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n".encode()


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server of little patience."""
    limits = ConnectionLimits(
        max_connections=40, max_head_bytes=8192, max_body_bytes=100_000, request_s=0.5, stalled_s=0.5
    )
    with running_service(tmp_path_factory.mktemp("s"), limits=limits, max_body_mb=0.1) as service:
        yield service


@contextlib.contextmanager
def connected(service: Service, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as client:
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(10)
        client.connect(service.address)
        yield client


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            data += part
    return data


def refusal(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def still_serves(service: Service) -> None:
    answer = httpx.post(f"{service.url}{COMPLETIONS}", json={"prompt": "<<fine>>"}, timeout=10)
    assert answer.json()["choices"][0]["text"] == "fine"
    wait_until(lambda: service.frontend.num_active == 0)


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1", HEAD, HEAD + b"x-a: b", HEAD + b"content-length: 20\r\n\r\n{", HEAD + b"x: y\r\n" * 3],
    ids=["nothing", "part of a line", "no headers", "part of a header", "part of a body", "some headers"],
)
def test_a_request_that_does_not_come_to_an_end_is_ended(strict: Service, sent: bytes) -> None:
    with connected(strict) as client:
        client.sendall(sent)
        assert refusal(rest(client)) == (408, "request_timeout")
    still_serves(strict)


def test_drops_of_a_request_do_not_keep_a_connection_open(strict: Service) -> None:
    """Slowloris: a byte now and then."""
    with connected(strict) as client:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in HEAD * 100:
                client.sendall(bytes([byte]))
                time.sleep(0.05)
                if time.monotonic() - began > 5:
                    raise AssertionError("still open")
    still_serves(strict)


@pytest.mark.parametrize(
    "start", [b"GET /" + b"a" * 100_000, HEAD + b"x: " + b"a" * 100_000, HEAD + b"x: y\r\n" * 9000]
)
def test_headers_without_end_are_refused(strict: Service, start: bytes) -> None:
    with connected(strict) as client, contextlib.suppress(ConnectionError):
        client.sendall(start)
        answer = rest(client)
        assert not answer or refusal(answer) == (431, "headers_too_large")
    still_serves(strict)


def test_a_chunked_body_without_end_is_refused_also_where_it_says_nothing(strict: Service) -> None:
    for filler in (b"5\r\nhello\r\n", b"1;" + b"x" * 500 + b"\r\na\r\n", b"0\r\n" + b"x-a: b\r\n" * 100):
        with connected(strict) as client, contextlib.suppress(ConnectionError):
            client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(100_000):
                client.sendall(filler)
                if filler.startswith(b"0"):
                    filler = b"x-a: b\r\n" * 100
            raise AssertionError("it takes megabytes")
    still_serves(strict)


def test_a_client_that_reads_nothing_is_cut_off(strict: Service) -> None:
    body = json.dumps({"prompt": "<<a>>", "ignore_eos": True, "max_tokens": 480, "n": 16, "stream": True}).encode()
    with connected(strict, receive_buffer=4096) as client:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: strict.frontend.num_active == 1)
        wait_until(lambda: strict.frontend.num_active == 0, 10)
        assert strict.frontend.client.num_open == 0
        assert b"[DONE]" not in rest(client)
    still_serves(strict)


def test_connections_above_the_limit_are_refused_and_idle_ones_end(strict: Service) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(strict)) for _ in range(40)]
        with connected(strict) as one_more:
            assert refusal(rest(one_more)) == (503, "too_many_connections")
        for client in idle:
            assert refusal(rest(client)) == (408, "request_timeout")
    still_serves(strict)


def test_idle_connections_in_numbers_delay_nobody(folder: Path) -> None:
    with running_service(folder) as service, contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(service))
        still_serves(service)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":' + b"[" * 200_000,
        b'{"prompt":"x","x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":' + b'{"a":' * 900 + b"1" + b"}" * 901,
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","max_tokens":' + b"9" * 100_000 + b"}",
        b'{"prompt":"x","seed":-' + b"9" * 30 + b"}",
        b'{"prompt":[' + b"9" * 40 + b"]}",
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","stop":[' + b'"a",' * 10 + b"null]}",
        b'{"prompt":"\\ud800"}',
        b"\xff\xfe{",
        b"\0" * 1000,
    ],
    ids=range(12),
)
def test_bodies_that_are_meant_to_explode_do_not(http: httpx.Client, service: Service, body: bytes) -> None:
    path = CHAT if b"messages" in body else COMPLETIONS
    answer = http.post(path, content=body)
    assert answer.status_code in (200, 400)
    assert answer.status_code == 200 or answer.json()["error"]["message"]
    still_serves(service)


def test_a_prompt_of_megabytes_is_refused_before_it_is_tokenized(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    text = "a b" * 2_000_000
    for path, body in ((COMPLETIONS, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
