"""uvicorn's HTTP connections, with a short way for the chunks of a stream.

A chunk that goes through ``send`` passes a chain of coroutines (server, middleware, framework, application) in which
nobody looks at it. So the connection offers an extension of ASGI: once a chunked response has been started with
``send``, its chunks may be written straight to the transport, as long as the client keeps up.
"""

from __future__ import annotations

import asyncio
import sys

import httptools
from starlette.types import Scope
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from uvicorn._types import Scope as UvicornScope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from radixserve.server.limits import LimitedProtocol

_EXTENSION = "radixserve.chunks"
# Requests that may wait behind the one being answered before the client has to.
_PIPELINED = 8
# Bytes that an answer of unknown length has left: more than any has.
_UNKNOWN = 1 << 62


class ChunkWriter:
    """Writes chunks of a response that was started and is not complete; others may be sent in the usual way."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl):
        self._transport = transport
        self._flow = flow

    @property
    def ready(self) -> bool:
        """False while a slow client has much unread, and when it is gone: ``send`` waits then."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, body: bytes) -> None:
        """One chunk; ``body`` must not be empty, for that would end the response."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class Connection(LimitedProtocol):
    """Tells of each request's scope how to write its chunks. Tells the request that is being answered when its client
    goes, not just the last one that was read. Answers requests that ask for another protocol, which nobody has here,
    as if they had not asked. Gives HTTP/1.0 no chunks, which it does not know.

    A client that shuts down its sending side is gone, as for uvicorn: nothing tells it from one that closed."""

    _answered: RequestResponseCycle | None = None
    _data = b""

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def on_headers_complete(self) -> None:
        """A request behind the one being answered stops uvicorn from reading on. Then nobody would hear that the client
        has gone, so a few of them are taken in."""
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _PIPELINED:
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"writer": ChunkWriter(self.transport, self.flow)}}

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
