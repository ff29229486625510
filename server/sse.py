"""Server-sent events: the response that writes a generation as it grows."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.server.choice import Choice
from radixserve.server.connection import ChunkWriter, chunk_writer
from radixserve.server.generation import Generation
from radixserve.server.protocol.answers import Answer

# A stream that was silent for one to two of these gets a sign of life, so that no proxy takes it for dead.
QUIET_S = 8.0


class EventStream(Response):
    """Owns ``generation``: whatever ends the response also ends the work in the engine.

    One write carries all that came since the last one. Nearly every token is written where it arrives, without a turn
    of the response's task; the task opens and ends the stream, and waits for a client that reads slowly, while its
    text gathers in the choices. ``interval``: tokens between two chunks of a choice.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, interval: int):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._interval = interval
        self._unopened = set(generation.choices)
        self._unfinished = list(generation.choices)
        self._num_writes = 0
        self._num_writes_seen = 0
        self._is_quiet = False
        self._chunks: ChunkWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._look)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._chunks = chunk_writer(scope)
            await self._send_all(send)
        finally:
            self._timer.cancel()
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        generation = self._generation
        generation.on_news = self._write_at_once
        while not generation.done:
            body = self._news() or (self._answer.keep_alive if self._is_quiet else b"")
            self._is_quiet = False
            if body:
                self._num_writes += 1
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if not (generation.done or self._has_news()):
                await generation.wait()
        await send({"type": "http.response.body", "body": self._news() + self._last(), "more_body": False})

    def _look(self) -> None:
        """Wake the task if nothing was written for a while. Costs nothing per token: it looks at a counter."""
        self._is_quiet = self._num_writes == self._num_writes_seen
        self._num_writes_seen = self._num_writes
        if self._is_quiet:
            self._generation.wake()
        self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._look)

    def _write_at_once(self) -> bool:
        """Write what there is past the chain of ``send`` calls; false if that must wait for the client."""
        if self._chunks is None or not self._chunks.ready:
            return False
        if body := self._news():
            self._num_writes += 1
            self._chunks.write(body)
        return True

    def _has_news(self) -> bool:
        return any(choice.has_news(self._interval) for choice in self._unfinished)

    def _news(self) -> bytes:
        if len(self._unfinished) == 1:
            return self._frames(self._unfinished[0])
        return b"".join([self._frames(choice) for choice in list(self._unfinished)])

    def _frames(self, choice: Choice) -> bytes:
        if not choice.has_news(self._interval):
            return b""
        opening = b""
        if choice in self._unopened:
            self._unopened.remove(choice)
            opening = self._answer.open_frame(choice)
        frames = opening + self._answer.text_frames(choice)
        if choice.finish_reason is None:
            return frames
        self._unfinished.remove(choice)
        return frames + self._answer.end_frame(choice)

    def _last(self) -> bytes:
        error = self._generation.error
        return self._answer.tail(self._generation.choices) if error is None else self._answer.failure(error)
