"""/v1/models: what is served here."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.frontend import Frontend
from radixserve.server.routes.common import frontend_of, json_response

router = APIRouter(tags=["models"])


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
