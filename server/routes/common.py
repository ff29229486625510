"""What the routes share: how a request becomes a body and a response, and what endpoints find on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.server.errors import blaming
from radixserve.server.frontend import Frontend, Result
from radixserve.server.protocol.fields import RequestModel, parse_body

IGNORED_HEADER = "x-radixserve-ignored-fields"


class DirectRoute(APIRoute):
    """For endpoints that take the request, and perhaps a ``body``, and return the response.

    FastAPI describes them, but has no part in the call, where it would look for dependencies and keep stacks of what to
    close: a fifth of a short request. The body is parsed in our way, in a thread if it is big, the model that it names
    must be served, the answer tells of fields that nobody knows, and errors name fields as the body has them.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.body_model: type[RequestModel] | None = get_type_hints(endpoint).get("body")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive, send)
        if self.body_model is None:
            response: Response = await self.endpoint(request, **request.path_params)
        else:
            response = await self._respond(request, self.body_model)
        await response(scope, receive, send)

    async def _respond(self, request: Request, body_model: type[RequestModel]) -> Response:
        data = await request.body()
        body, unknown = await offload(request, lambda: parse_body(body_model, data))
        frontend_of(request).check_model(getattr(body, "model", None))
        with blaming(body.field_names):
            response: Response = await self.endpoint(request, body)
        if unknown:
            response.headers[IGNORED_HEADER] = ",".join(unknown)
        return response


def frontend_of(request: Request) -> Frontend:
    frontend = request.app.state.frontend
    assert isinstance(frontend, Frontend)
    return frontend


async def offload(request: Request, work: Callable[[], Result]) -> Result:
    """Do ``work`` on the request's body, in a thread if the body is large."""
    return await frontend_of(request).offload(len(await request.body()), work)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
