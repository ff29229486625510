"""Server-sent events: the response that writes a generation as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.server.choice import Choice
from radixserve.server.connection import ChunkWriter, chunk_writer
from radixserve.server.generation import Generation
from radixserve.server.protocol.answer import Answer

# A stream that was silent for one to two of these gets a sign of life, so that no proxy takes it for dead.
QUIET_S = 8.0


class EventStream(Response):
    """Owns ``generation``: whatever ends the response also ends the work in the engine.

    One write carries all that came since the last one. Nearly every token is written where it arrives, without a turn
    of the response's task; the task opens and ends the stream, and waits for a client that reads slowly, while its
    text gathers in the choices. ``interval``: tokens between two chunks of a choice.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, interval: int, headers: Mapping[str, str]):
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._interval = interval
        self._unopened = set(generation.choices)
        self._unfinished = list(generation.choices)
        self._num_writes = 0
        self._chunks: ChunkWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation as generation, _Quiet(self) as quiet:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._chunks = chunk_writer(scope)
            generation.on_news = self._write_at_once
            while not generation.done:
                body = self._news() or (self._answer.keep_alive if quiet.take() else b"")
                if body:
                    self._num_writes += 1
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                if not (generation.done or self._has_news()):
                    await generation.wait()
            body = self._news() + self._last()
            await send({"type": "http.response.body", "body": body, "more_body": False})

    @property
    def num_writes(self) -> int:
        return self._num_writes

    def wake(self) -> None:
        self._generation.wake()

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


class _Quiet:
    """Wakes a stream that has written nothing for a while. Costs nothing per token: it looks at a counter."""

    def __init__(self, stream: EventStream):
        self._stream = stream
        self._seen_writes = 0
        self._due = False

    def __enter__(self) -> _Quiet:
        self._arm()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def take(self) -> bool:
        """Whether a sign of life is due; it is then taken as given."""
        due, self._due = self._due, False
        return due

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._look)

    def _look(self) -> None:
        self._due = self._stream.num_writes == self._seen_writes
        self._seen_writes = self._stream.num_writes
        if self._due:
            self._stream.wake()
        self._arm()
