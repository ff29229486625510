"""ASGI layers around the routes. Plain ASGI, no BaseHTTPMiddleware: streamed tokens pass through here one by one.

From the outside: ``RequestIds`` (every response gets its id), CORS (starlette's, so that refusals carry its headers
too), ``Gate`` (who and what gets in), the application.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixserve.engine.errors import InvalidRequest, RequestError
from radixserve.server.auth import EVENTS_PATH, ApiKeys
from radixserve.server.errors import RequestFailed, error_response
from radixserve.server.protocol.fields import is_name
from radixserve.server.request_log import log_refusal

log = logging.getLogger("radixserve.server")


@dataclass(slots=True)
class RequestIds:
    """Names each request: by the client's X-Request-Id if it is a sane one, else by a random id."""

    app: ASGIApp
    log_refusals: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if is_name(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
                if self.log_refusals and message["status"] >= 400 and scope["method"] == "POST":
                    log_refusal(request_id, scope["method"], scope["path"], message["status"])
            await send(message)

        await self.app(scope, receive, send_with_id)


@dataclass(slots=True)
class Gate:
    """Checks keys, refuses work while draining, reads bodies up to a limit, and cancels handlers whose client is gone.

    The frontend's ``num_active`` counts the POST requests inside.
    """

    app: ASGIApp
    keys: ApiKeys
    max_body_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        is_work = scope["method"] == "POST"
        try:
            self._admit(scope)
            body = await self._read(receive) if is_work else b""
        except RequestError as error:
            return await error_response(error, scope["path"])(scope, receive, send)
        if body is None:
            return None
        call = _Call(scope, body, receive, send)
        if not is_work:
            # Only this one lasts. It does not count as work: a page left open must not hold up a shutdown.
            return await self._guard(call, watch=scope["path"] == EVENTS_PATH)
        frontend = scope["app"].state.frontend
        frontend.num_active += 1
        try:
            await self._guard(call, watch=True)
        finally:
            frontend.num_active -= 1
        return None

    def _admit(self, scope: Scope) -> None:
        """Raises ``RequestError`` that says why it must not come in."""
        headers = Headers(scope=scope)
        authorization = headers.get("authorization")
        if authorization is None and "x-api-key" in headers:  # as Anthropic's clients send it
            authorization = f"Bearer {headers['x-api-key']}"
        raw = None if authorization is None else authorization.encode("latin-1")
        scope["state"]["tenant"] = self.keys.tenant(scope["method"], scope["path"], raw)
        if scope["method"] == "POST" and scope["app"].state.frontend.draining:
            raise RequestFailed("the server is shutting down", code="draining", retry_after_s=5)
        self._check_size(int(headers.get("content-length") or 0))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.max_body_bytes:
            limit = f"{self.max_body_bytes / 2**20:g} MiB"
            raise InvalidRequest(f"the body is larger than {limit}", code="body_too_large", status=413)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, or None if the client left before it was complete. Raises ``RequestError``."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            self._check_size(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    async def _guard(self, call: _Call, *, watch: bool) -> None:
        scope = call.scope
        try:
            await (call.run_while_connected(self.app) if watch else self.app(scope, call.receive, call.send))
        except Exception:
            request_id = scope["state"]["request_id"]
            log.exception("request %s failed", request_id, extra={"facts": {"request_id": request_id}})
            if call.started:
                raise  # uvicorn cuts the connection, so that the client sees a broken answer as broken
            failure = RequestFailed("internal error", status=500, code="internal_error")
            await error_response(failure, scope["path"])(scope, call.receive, call.send)


@dataclass(slots=True)
class _Call:
    """One request whose body has been read."""

    scope: Scope
    body: bytes | None
    client_receive: Receive
    client_send: Send
    started: bool = False
    complete: bool = False
    gone: bool = False

    async def run_while_connected(self, app: ASGIApp) -> None:
        """Run ``app``, but cancel it (whatever it awaits) when the client disconnects before the answer is complete."""
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._watch(task))
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self.gone and not self.scope["app"].state.frontend.draining:
                raise
        finally:
            watcher.cancel()

    async def _watch(self, task: asyncio.Task[None]) -> None:
        while (await self.client_receive())["type"] != "http.disconnect":
            pass
        # The end of a response looks like a disconnect too.
        if not self.complete:
            self.gone = True
            task.cancel()

    async def receive(self) -> Message:
        if self.body is None:
            await asyncio.Future[None]()  # There is nothing more; a disconnect comes as a cancellation.
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
        elif not message.get("more_body", False):
            self.complete = True
        await self.client_send(message)
