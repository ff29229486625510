"""The page at /, whose files are static, and the stream of events that tells it what the engine does."""

from __future__ import annotations

import ipaddress
import mimetypes
from importlib.resources import files
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from radixserve.configs.schema import ServerOptions
from radixserve.server.auth import EVENTS_PATH, PAGE_PREFIX, ApiKeys
from radixserve.server.watchers import Watchers

_HEADERS = {
    # Nothing comes from elsewhere, nothing is inline, and no other site may frame the page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_PROXY_HEADERS = frozenset({"forwarded", "x-forwarded-for", "x-real-ip", "via"})


def routes(watchers: Watchers, options: ServerOptions, keys: ApiKeys) -> list[Route]:
    """Not part of the API, and so not of its description."""

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
