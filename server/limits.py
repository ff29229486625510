"""What one connection may take of a worker: bytes before a request is understood, time, and unread answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixserve.server.errors import RequestFailed, error_body

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    413: b"Content Too Large",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
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


class LimitedProtocol(HttpToolsProtocol):
    """Ends connections that take more than their share, with an answer where one can still be given. (The gate looks at
    bodies; here it is what uvicorn reads by itself, without a limit.)"""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._limits = limits
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
        self._cancel_stall_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_request_timer()
        self._cancel_stall_timer()

    # ---- what the parser tells ----

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_request_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes after a chunked body would be kept, and means nothing to us
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._num_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._num_bytes = True, 0
        self._cancel_request_timer()
        super().on_message_complete()

    # ---- timers ----

    def _start_request_timer(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(self._limits.request_s, self._on_request_timeout)

    def _cancel_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # ---- ends ----

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "bad_request")

    def _on_request_timeout(self) -> None:
        self._request_timer = None
        self._refuse(408, f"the request was not complete after {self._limits.request_s:g} s", "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Close, after telling why, unless an answer is on its way already."""
        if not self.transport.is_closing() and (self.cycle is None or not self.cycle.response_started or self._idle):
            body = error_body(RequestFailed(message, status=status, code=code))
            head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (status, _REASONS[status])
            self.transport.write(b"%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (head, len(body), body))
        self.transport.close()

    @property
    def _idle(self) -> bool:
        """The last request was answered, and what is being read is another one."""
        return self._in_head and self.cycle.response_complete
