"""A streaming client for OpenAI-compatible servers that is light enough to measure fast ones.

A chunk costs one parser call and one search over its bytes; JSON is parsed once an answer. One request at a time on a
keep-alive connection. ``benchmarks/notes/load_client.md`` has its own limit.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from array import array
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

# A chunk with some text; a quote inside a JSON string is escaped, so text cannot look like it.
_HAS_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text)": ?"(?!")').search
_HAS_FACTS = re.compile(rb'"(?:usage|error)": ?[{"]').search
_DATA = b"data: "
# Servers close idle connections (uvicorn after 5 s); one that may be closing just now is not used again.
_MAX_IDLE_S = 3.0
_SHOWN_CHARS = 200  # of an error


class Answer:
    """The server's answer to one request as it comes. ``times``: clock of each chunk with text, in seconds."""

    def __init__(self) -> None:
        self.status = 0
        self.times = array("d")
        self._rest = b""
        self._texts: list[bytes] = []
        self._facts = b""

    def feed(self, now: float, data: bytes) -> None:
        if self.status != 200:
            self._rest += data
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if _HAS_TEXT(line):
                self.times.append(now)
                self._texts.append(line)
            elif _HAS_FACTS(line):
                self._facts = line

    def usage(self) -> dict[str, Any]:
        """The usage that the server reported, or {}."""
        for line in (self._facts, *self._texts[-1:]):
            usage = _event(line).get("usage")
            if isinstance(usage, dict):
                return usage
        return {}

    def error(self) -> str | None:
        """What the server says went wrong."""
        if self.status != 200:
            return f"status {self.status}: {_message(self._rest)}"
        error = _event(self._facts).get("error")
        return None if error is None else str(error)[:_SHOWN_CHARS]

    def text(self) -> str:
        """What the model said."""
        deltas = (_event(line)["choices"][0].get("delta", {}) for line in self._texts)
        return "".join(str(delta.get("content") or "") for delta in deltas)


def _message(body: bytes) -> str:
    """What a body in OpenAI's form of errors says, else the body."""
    try:
        return str(json.loads(body)["error"]["message"])[:_SHOWN_CHARS]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:_SHOWN_CHARS]


def _event(line: bytes) -> dict[str, Any]:
    event = json.loads(line.removeprefix(_DATA)) if line else {}
    return event if isinstance(event, dict) else {}


@dataclass(frozen=True)
class Target:
    """Where requests go. ``url`` is that of the server, without /v1."""

    url: str
    api_key: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    def tls(self) -> ssl.SSLContext | None:
        """A new context (milliseconds) for connections to an https server."""
        return ssl.create_default_context() if self.url.startswith("https:") else None

    def request(self, body: bytes) -> bytes:
        """A chat completion as bytes for the socket."""
        parts = urlsplit(self.url)
        key = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(eq=False)
class Connection(asyncio.Protocol):
    """A keep-alive connection that carries one request at a time. Owns its socket; ``close`` it."""

    target: Target
    tls: ssl.SSLContext | None
    _transport: asyncio.Transport | None = None
    _idle_since: float = 0.0

    async def post(self, request: bytes, answer: Answer) -> None:
        """Send ``request`` and read all of ``answer``. Raises OSError when the connection breaks."""
        if self._transport is not None and time.perf_counter() - self._idle_since < _MAX_IDLE_S:
            try:
                return await self._exchange(request, answer)
            except OSError:
                if answer.status:
                    raise
            # Closed after the last answer without a word, as llama.cpp's server does: it has not read the request.
        self.close()
        self._parser = httptools.HttpResponseParser(self)
        await asyncio.get_running_loop().create_connection(lambda: self, *self.target.address, ssl=self.tls)
        await self._exchange(request, answer)

    async def _exchange(self, request: bytes, answer: Answer) -> None:
        assert self._transport is not None
        self._answer: Answer = answer
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        self._idle_since = time.perf_counter()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # ---- called by the event loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(error or ConnectionError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    # ---- called by the parser ----

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._answer.feed(self._now, data)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if not self._done.done():
            self._done.set_result(None)
