"""What the routes share: the frontend, the parsed body, headers, and the schemas of bodies for OpenAPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.server.frontend import Frontend, Result
from radixserve.server.protocol.fields import Model, RequestModel, parse_body

IGNORED_HEADER = "x-radixserve-ignored-fields"


class DirectRoute(APIRoute):
    """For endpoints that take the request and return the response: FastAPI describes them, but has no part in the call,
    where it would look for dependencies and bodies and keep stacks of what to close: a fifth of a short request."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def frontend_of(request: Request) -> Frontend:
    frontend = request.app.state.frontend
    assert isinstance(frontend, Frontend)
    return frontend


async def parsed(request: Request, model: type[Model]) -> tuple[Model, dict[str, str]]:
    """The body, and headers for the answer; big ones are parsed in a thread. Raises ``InvalidRequest``."""
    data = await request.body()
    body, unknown = await offload(request, lambda: parse_body(model, data))
    return body, ({IGNORED_HEADER: ",".join(unknown)} if unknown else {})


async def offload(request: Request, work: Callable[[], Result]) -> Result:
    """Do ``work`` on the request's body, in a thread if the body is large."""
    return await frontend_of(request).offload(len(await request.body()), work)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def takes(model: type[RequestModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that parses its body itself. Referenced schemas go to ``components`` later."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
