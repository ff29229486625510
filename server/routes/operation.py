"""What is served here and how it does, and routes for operators: configuration, aborting, flushing the cache."""

from __future__ import annotations

import os
import re
from importlib.metadata import version as package_version
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.configs.schema import SECRET_OPTIONS
from radixserve.engine.errors import InvalidRequest
from radixserve.server.frontend import Frontend
from radixserve.server.protocol.chat import ChatAnswer
from radixserve.server.protocol.completions import CompletionAnswer
from radixserve.server.protocol.fields import RequestModel
from radixserve.server.protocol.messages import MessagesAnswer
from radixserve.server.protocol.responses import ResponsesAnswer
from radixserve.server.routes.common import DirectRoute, frontend_of, json_response

router = APIRouter(tags=["operation"], route_class=DirectRoute)

_ANSWERS = (ChatAnswer, CompletionAnswer, ResponsesAnswer, MessagesAnswer)
_ID_PREFIX = re.compile(f"^({'|'.join(answer.id_prefix for answer in _ANSWERS)})(?=.)")


class AbortBody(RequestModel):
    """``rid`` is SGLang's name for ``request_id``."""

    request_id: str = ""
    rid: str = ""
    abort_all: bool = False


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 only if a request could be served now; else 503 with the reason, and the progress while loading."""
    state = frontend_of(request).health()
    content = {"status": state.status}
    if state.ok:
        return json_response(content)
    details = {"reason": state.reason} | ({"progress": state.progress} if state.status == "loading" else {})
    return json_response(content | details, 503, {"retry-after": "1", "cache-control": "no-store"})


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    frontend = frontend_of(request)
    return json_response({"object": "list", "data": [_card(frontend, name) for name in frontend.model_names]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    frontend = frontend_of(request)
    return json_response(_card(frontend, frontend.check_model(model_id)))


def _card(frontend: Frontend, name: str) -> dict[str, Any]:
    """``max_model_len`` is null until the engine has told it."""
    status = frontend.client.status
    return {
        "id": name,
        "object": "model",
        "created": frontend.created,
        "owned_by": "radixserve",
        "root": frontend.model_names[0],
        "max_model_len": (status.max_model_len or None) if status else None,
    }


@router.get("/version")
async def version(_: Request) -> Response:
    return json_response({"version": package_version("radixserve")})


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    frontend = frontend_of(request)
    status = await frontend.client.fresh_status()
    content = {
        "version": package_version("radixserve"),
        "status": frontend.health().status,
        "worker_pid": os.getpid(),
        "engine_pid": status.pid if status else None,
        "max_model_len": status.max_model_len if status else None,
        "vocab_size": status.vocab_size if status else None,
        "open_requests": frontend.client.num_open,
        "stats": status.stats if status else {},
        "config": frontend.config.model_dump(mode="json", exclude=set(SECRET_OPTIONS)),
    }
    return json_response(content)


@router.post("/abort_request")
async def abort_request(request: Request, body: AbortBody) -> Response:
    """End a request by the id in its answer, or by its x-request-id; its client gets an error."""
    given = body.request_id or body.rid
    if not given and not body.abort_all:
        raise InvalidRequest("request_id (or abort_all: true) is required", param="request_id")
    # An x-request-id may begin like the id of an answer.
    request_ids = {""} if body.abort_all else {given, _ID_PREFIX.sub("", given)}
    for request_id in request_ids:
        frontend_of(request).client.abort_by_id(request_id)
    return json_response({"status": "ok"})


@router.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Drop all cached prefixes that no running request holds; answers how many tokens they had."""
    return json_response({"num_tokens": await frontend_of(request).client.flush_cache()})
