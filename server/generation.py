"""All choices of one HTTP request, from the engine's requests to the response that streams them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.engine.messages import Submit
from radixserve.server.auth import Tenant
from radixserve.server.choice import Choice
from radixserve.server.connection import ChunkWriter, chunk_writer
from radixserve.server.engine_client import EngineClient
from radixserve.server.errors import RequestFailed
from radixserve.server.protocol.answers import Answer

# A stream that was silent for one to two of these gets a sign of life, so that no proxy takes it for dead.
QUIET_S = 8.0


class Generation:
    """All choices of one HTTP request. ``close`` aborts what still runs in the engine.

    ``streaming``: wake the waiting task at every token instead of at the end only. ``on_news`` may spare it that: it is
    called while the task waits and the generation goes on, and returns whether it took what there was.
    """

    def __init__(self, client: EngineClient, choices: Sequence[Choice], *, streaming: bool):
        self.choices = choices
        self._client = client
        self._streaming = streaming
        self._uids: dict[Choice, int] = {}
        self._num_running = len(choices)
        self._waiter: asyncio.Future[None] | None = None
        self.on_news: Callable[[], bool] = lambda: False
        self.error: RequestFailed | None = None

    def submit(self, request_id: str, tenant: Tenant, priority: int, namespace: str) -> None:
        """Hand all choices to the engine. Raises ``RequestFailed``."""
        for choice in self.choices:
            uid = self._uids[choice] = self._client.new_uid()
            choice.on_change = self._on_change
            request = Submit(
                uid, request_id, choice.prompt.ids, choice.sampling, priority, namespace, tenant.name, tenant.weight
            )
            self._client.submit(request, choice)

    @property
    def done(self) -> bool:
        """Every choice is complete, or one has failed."""
        return self._num_running == 0 or self.error is not None

    @property
    def started(self) -> bool:
        return any(choice.started for choice in self.choices)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until something changes; false if nothing did within ``timeout_s``."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiter
        except TimeoutError:
            return False
        finally:
            self._waiter = None
        return True

    def close(self) -> None:
        for uid in self._uids.values():
            self._client.requests.abort(uid)
        self._uids.clear()

    def _on_change(self, choice: Choice) -> None:
        if choice.done:
            self._num_running -= 1
            self.error = self.error or choice.error
            self._client.requests.complete(self._uids[choice])  # Only a stop string leaves something to end.
        if self._waiter is None or self._waiter.done():
            return
        if self.done or (self._streaming and not self.on_news()):
            self._waiter.set_result(None)


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
        self._chunks: ChunkWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._chunks = chunk_writer(scope)
            await self._send_all(send)
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        generation = self._generation
        generation.on_news = self._write_at_once
        while not generation.done:
            body, num_writes = self._news(), self._num_writes
            if not body:
                if await generation.wait(QUIET_S) or self._num_writes > num_writes:
                    continue
                body = self._answer.keep_alive
            self._num_writes += 1
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": self._news() + self._last(), "more_body": False})

    def _write_at_once(self) -> bool:
        """Write what there is past the chain of ``send`` calls; false if that must wait for the client."""
        if self._chunks is None or not self._chunks.ready:
            return False
        if body := self._news():
            self._num_writes += 1
            self._chunks.write(body)
        return True

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
