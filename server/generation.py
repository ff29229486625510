"""All choices of one HTTP request, from the engine's requests to the task that writes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from radixserve.engine.messages import Submit
from radixserve.server.auth import Tenant
from radixserve.server.choice import Choice
from radixserve.server.engine_client import EngineClient
from radixserve.server.errors import RequestFailed


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

    async def wait(self) -> None:
        """Until something changes, or ``wake`` is called."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def wait_until_started(self, timeout_s: float) -> None:
        """Until the engine has said something about the request, but no longer than ``timeout_s``."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self.wake)
        try:
            if not self.started:
                await self.wait()
        finally:
            timer.cancel()  # also when the client has left: the timer would keep the whole request until it is due

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        for uid in self._uids.values():
            self._client.requests.abort(uid)
        self._uids.clear()

    def _on_change(self, choice: Choice) -> None:
        if choice.done:
            self._num_running -= 1
            self.error = self.error or choice.error
            self._client.requests.complete(self._uids[choice])  # Only a stop string leaves something to end.
        if self._waiter is not None and (self.done or (self._streaming and not self.on_news())):
            self.wake()
