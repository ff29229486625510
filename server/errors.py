"""What can go wrong with a request, in OpenAI's form, ``{"error": {message, type, param, code}}``, or Anthropic's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from radixserve.engine.errors import InvalidRequest, RequestError


class RequestFailed(RequestError):
    """A request that may be right but gets no answer: the server is not ready, full, or broken; or it was aborted."""

    status = 503


MESSAGES_PATH = "/v1/messages"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MESSAGES_TYPES = _TYPES | {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def error_body(error: RequestError, path: str = "") -> bytes:
    """``path``: of the request, which decides the form."""
    if is_messages_path(path):
        return msgspec.json.encode(messages_error(error))
    kind = _TYPES.get(error.status) or ("server_error" if error.status >= 500 else "invalid_request_error")
    fault = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fault})


def is_messages_path(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def messages_error(error: RequestError) -> dict[str, Any]:
    """In Anthropic's form."""
    kind = _MESSAGES_TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: RequestError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status in (401, 403):
        headers["www-authenticate"] = "Bearer"
    if error.code == "draining":
        headers["connection"] = "close"
    return Response(error_body(error, path), error.status, headers, "application/json")


def invalid_body(error: ValidationError) -> InvalidRequest:
    """The first fault that pydantic found, named as a path into the body: ``messages[0].role``."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{part}" if path else part
    what = "is required" if fault["type"] == "missing" else fault["msg"]
    what = what.removeprefix("Value error, ").removeprefix("Input ")
    return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)


@contextmanager
def blaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors in here name fields as the client knows them. ``names``: its name for ours, the longest paths first."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        for ours, theirs in names.items():
            if param == ours or param.startswith((ours + ".", ours + "[")):
                error.param = theirs + param.removeprefix(ours)
                if error.message.startswith(ours):
                    error.message = theirs + error.message.removeprefix(ours)
                break
        raise


async def on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope["path"])


async def on_http_error(request: Request, error: Exception) -> Response:
    """404, 405 and the like, raised by the router."""
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            message = "no such route; /openapi.json lists those there are"
        case 405:
            message = f"this route takes {(error.headers or {})['Allow']}, not {request.method}"
        case _:
            message = str(error.detail)
    return error_response(RequestFailed(message, status=error.status_code), request.scope["path"], error.headers)


HANDLERS: dict[Any, Any] = {RequestError: on_request_error, HTTPException: on_http_error}
