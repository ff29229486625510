"""uvicorn's HTTP connections, with limits on what each may take, and a short way for the chunks of a stream.

A chunk that goes through ``send`` passes a chain of coroutines (server, middleware, framework, application) in which
nobody looks at it. So the connection offers an extension of ASGI: once a chunked response has been started with
``send``, its chunks may be written straight to the transport, as long as the client keeps up.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from uvicorn._types import Scope as UvicornScope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from radixserve.server.errors import RequestFailed, error_body

_EXTENSION = "radixserve.chunks"
# Requests that may wait behind the one being answered before the client has to.
_PIPELINED = 8
# Bytes that an answer of unknown length has left: more than any has.
_UNKNOWN = 1 << 62
# Chunked bodies may be twice as long on the wire as what they carry; nobody sends chunks of a few bytes in earnest.
_FRAMING = 2


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """``request_s``: from the first byte of a request (of the first one: from the connection) to its last one.
    ``stalled_s``: how long a client may read nothing of an answer that it leaves in our buffers."""

    max_connections: int = 16_384
    max_head_bytes: int = 64 * 1024
    max_body_bytes: int = 32 * 2**20
    request_s: float = 60.0
    stalled_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ChunkWriter:
    """Writes chunks of a response that was started and is not complete; others may be sent in the usual way."""

    transport: asyncio.Transport
    flow: FlowControl

    @property
    def ready(self) -> bool:
        """False while a slow client has much unread, and when it is gone: ``send`` waits then."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write(self, body: bytes) -> None:
        """One chunk; ``body`` must not be empty, for that would end the response."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class Connection(HttpToolsProtocol):
    """Tells of each request's scope how to write its chunks. Tells the request that is being answered when its client
    goes, not just the last one that was read. Answers requests that ask for another protocol, which nobody has here,
    as if they had not asked. Gives HTTP/1.0 no chunks, which it does not know.

    Ends what takes more than its share, with an answer where one can still be given. (The gate looks at bodies; here
    it is what uvicorn reads by itself, without a limit.) A client that shuts down its sending side is gone, as for
    uvicorn: nothing tells it from one that closed."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._answered: RequestResponseCycle | None = None
        self._data = b""  # what came last
        self._in_head = True  # of a request, or between two
        self._num_bytes = 0  # of the head or body that is being read
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    # ---- what asyncio tells ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "the server has too many connections", "too_many_connections")
        else:
            self._start_request_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._data = data
        self._num_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._num_bytes > self._limits.max_head_bytes:
            self._refuse(431, f"the headers are longer than {self._limits.max_head_bytes} bytes", "headers_too_large")
        elif self._num_bytes > _FRAMING * self._limits.max_body_bytes + self._limits.max_head_bytes:
            self._refuse(413, "the body is too large", "body_too_large")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stall_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._request_timer)
        _cancel(self._stall_timer)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    # ---- what the parser tells ----

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_request_timer()
        self.scope["extensions"] = {_EXTENSION: {"writer": ChunkWriter(self.transport, self.flow)}}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes after a chunked body would be kept, and means nothing to us
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request behind the one being answered stops uvicorn from reading on. Then nobody would hear that the client
        has gone, so a few of them are taken in."""
        self._in_head, self._num_bytes = False, 0
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _PIPELINED:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._in_head, self._num_bytes = True, 0
        _cancel(self._request_timer)
        self._request_timer = None
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Called with a request that asks for any protocol. The parser has passed over its body, so what came is read
        once more, with another parser and without the header (a server may ignore it: RFC 9110, section 7.8)."""
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        version, method = self.parser.get_http_version().encode(), self.parser.get_method()
        head = [method, b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", self._data[upgrade.args[0] :]]))

    def _should_upgrade(self) -> bool:
        return self._get_upgrade() is not None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.scope["extensions"].pop(_EXTENSION)
            app = _without_chunks(cycle, app)
        super()._start_asgi_task(cycle, app)

    # ---- ends ----

    def _start_request_timer(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(self._limits.request_s, self._on_request_timeout)

    def _on_request_timeout(self) -> None:
        self._request_timer = None
        self._refuse(408, f"the request was not complete after {self._limits.request_s:g} s", "request_timeout")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "bad_request")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Close, after telling why, unless an answer is on its way already."""
        if not self.transport.is_closing() and (self.cycle is None or not self.cycle.response_started or self._idle):
            body = error_body(RequestFailed(message, status=status, code=code))
            reason = HTTPStatus(status).phrase.encode()
            head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (status, reason)
            self.transport.write(b"%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (head, len(body), body))
        self.transport.close()

    @property
    def _idle(self) -> bool:
        """The last request was answered, and what is being read is another one."""
        return self._in_head and self.cycle.response_complete


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """``app`` for a client that learns from the end of the connection where an answer of unknown length ends."""

    async def run(scope: UvicornScope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_plain(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message["headers"]):
                    cycle.chunked_encoding, cycle.expected_content_length = False, _UNKNOWN
            elif message["type"] == "http.response.body" and cycle.expected_content_length >= _UNKNOWN:
                # uvicorn counts down to 0 what is still to come.
                more = message.get("more_body", False)
                cycle.expected_content_length = len(message.get("body", b"")) + (_UNKNOWN if more else 0)
            await send(message)

        await app(scope, receive, send_plain)

    return run


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """The short way of the connection that ``scope`` came from; None where another server runs the application."""
    extension = scope.get("extensions", {}).get(_EXTENSION)
    return None if extension is None else extension["writer"]
