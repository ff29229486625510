"""The page at /, whose files are static, and the stream of events that tells it what the engine does.

Token ids become text here, and only for those who may read it. While nobody watches, nothing is done.
"""

from __future__ import annotations

import asyncio
import ipaddress
import mimetypes
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from radixserve.configs.schema import ServerOptions
from radixserve.engine.messages import Observation
from radixserve.engine.observation import LEASE_S, SeenNode, TreeEvent
from radixserve.server.auth import EVENTS_PATH, PAGE_PREFIX, ApiKeys
from radixserve.server.errors import RequestFailed
from radixserve.server.frontend import Frontend
from radixserve.server.protocol.answers import event_frame

MAX_WATCHERS = 16
TICK_S = 1.0
# Frames that wait for a watcher who reads slowly; one more, and it is sent away to begin anew.
_MAX_FRAMES = 16
_HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")

assert TICK_S < LEASE_S / 2
_HEADERS = {
    # Nothing comes from elsewhere, nothing is inline, and no other site may frame the page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_PROXY_HEADERS = frozenset({"forwarded", "x-forwarded-for", "x-real-ip", "via"})


def routes(frontend: Frontend, options: ServerOptions, keys: ApiKeys) -> list[Route]:
    """Not part of the API, and so not of its description."""
    watchers = Watchers(frontend)

    async def events(request: Request) -> Response:
        watchers.require_room()
        frames = watchers.frames(with_text=may_read_text(request, options, keys))
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(frames, headers=headers, media_type="text/event-stream")

    found = [Route(EVENTS_PATH, events)]
    for file in files("radixserve.server").joinpath("page").iterdir():
        path = "/" if file.name == "index.html" else PAGE_PREFIX + file.name
        found.append(_static(path, file.read_bytes(), mimetypes.guess_type(file.name)[0]))
    return found


def may_read_text(request: Request, options: ServerOptions, keys: ApiKeys) -> bool:
    """The tree holds everybody's prompts. They are shown to operators, to the one owner of the keys or, where there are
    no keys, on this machine: asked by a name of this machine (else a foreign site could send its visitors), and through
    no proxy.
    """
    if options.page == "full" or keys.has_operators or keys.num_tenants == 1:
        return True
    if keys.num_tenants > 1 or request.client is None or not _PROXY_HEADERS.isdisjoint(request.headers.keys()):
        return False
    name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    return _is_loopback(request.client.host) and (name == "localhost" or _is_loopback(name))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _static(path: str, content: bytes, media_type: str | None) -> Route:
    async def serve(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, serve)


class Watchers:
    """Owns the queues of the event streams that are open, and renews the engine's lease while there are any."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._queues: dict[asyncio.Queue[bytes | None], bool] = {}  # and whether its reader may see text
        self._ticker: asyncio.TimerHandle | None = None
        frontend.client.on_observation = self._show

    def require_room(self) -> None:
        """Raises ``RequestFailed`` when too many watch."""
        if len(self._queues) >= MAX_WATCHERS:
            raise RequestFailed(
                "too many pages watch the engine", status=429, code="too_many_watchers", retry_after_s=5
            )

    async def frames(self, *, with_text: bool) -> AsyncIterator[bytes]:
        """Server-sent events, until the server is shut down or the reader falls behind."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_FRAMES)
        self._queues[queue] = with_text
        self._frontend.client.watch(anew=True)
        if self._ticker is None:
            self._tick()
        try:
            while (frame := await queue.get()) is not None:
                yield frame
        finally:
            self._queues.pop(queue, None)

    def _tick(self) -> None:
        self._ticker = None
        if not self._queues:
            return
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._frontend.client.watch(anew=False)
        health, numbers = self._frontend.health(), self._frontend.worker_numbers.sum_of_all()
        latency = {name: numbers.histograms[name] for name in _HISTOGRAMS}
        frame = event_frame("server", {"health": health, "latency": latency})
        for queue in list(self._queues):
            self._put(queue, frame)
            if self._frontend.draining:
                self._dismiss(queue)

    def _show(self, observation: Observation) -> None:
        frames: dict[bool, bytes] = {}
        for queue, with_text in list(self._queues.items()):
            if with_text not in frames:
                frames[with_text] = event_frame("view", self._view(observation, self._text if with_text else None))
            self._put(queue, frames[with_text])

    def _put(self, queue: asyncio.Queue[bytes | None], frame: bytes) -> None:
        if queue.qsize() < _MAX_FRAMES - 1:
            queue.put_nowait(frame)
        else:
            self._dismiss(queue)

    def _dismiss(self, queue: asyncio.Queue[bytes | None]) -> None:
        if self._queues.pop(queue, None) is not None:
            queue.put_nowait(None)

    def _text(self, ids: list[int]) -> str:
        token_bytes = self._frontend.text.tokenizer.token_bytes
        return b"".join(map(token_bytes, ids)).decode("utf-8", "replace")

    def _view(self, observation: Observation, text: Callable[[list[int]], str] | None) -> dict[str, Any]:
        view = observation.view

        def node(seen: SeenNode) -> dict[str, Any]:
            shown = seen._asdict()
            head, tail = shown.pop("head"), shown.pop("tail")
            return shown if text is None else shown | {"head": text(head), "tail": text(tail)}

        def event(told: TreeEvent) -> dict[str, Any]:
            return told._asdict() | {"nodes": [node(seen) for seen in told.nodes]}

        return {
            "at": view.at,
            "page_size": view.page_size,
            "with_text": text is not None,
            "stats": observation.stats,
            "tree": None if view.tree is None else [node(seen) for seen in view.tree],
            "events": [event(told) for told in view.events],
            "steps": view.steps,
            "requests": view.requests,
        }
