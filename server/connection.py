"""uvicorn's HTTP connections, with a short way for the chunks of a stream.

A chunk that goes through ``send`` passes a chain of coroutines (server, middleware, framework, application) in which
nobody looks at it. So the connection offers an extension of ASGI: once a chunked response has been started with
``send``, its chunks may be written straight to the transport, as long as the client keeps up.
"""

from __future__ import annotations

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl

from radixserve.server.limits import LimitedProtocol

_EXTENSION = "radixserve.chunks"


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
    """Tells of each request's scope how to write its chunks."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"writer": ChunkWriter(self.transport, self.flow)}}


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """The short way of the connection that ``scope`` came from; None where another server runs the application."""
    extension = scope.get("extensions", {}).get(_EXTENSION)
    return None if extension is None else extension["writer"]
