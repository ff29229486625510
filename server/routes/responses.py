"""/v1/responses: OpenAI's newer form of a chat, without anything stored."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.errors import blaming
from radixserve.server.protocol.responses import FIELD_NAMES, ResponsesRequest
from radixserve.server.protocol.responses_answer import ResponsesAnswer
from radixserve.server.routes.answering import respond_to_chat
from radixserve.server.routes.common import DirectRoute, offload, parsed, takes

router = APIRouter(tags=["generation"], route_class=DirectRoute)

RESPONSES_PATH = "/v1/responses"


@router.post(RESPONSES_PATH, openapi_extra=takes(ResponsesRequest))
async def create_response(request: Request) -> Response:
    call = await parsed(request, ResponsesRequest)
    body = call.body
    with blaming(FIELD_NAMES):
        chat = await offload(request, body.for_chat)
        return await respond_to_chat(
            request, chat, call.headers, lambda request_id, model: ResponsesAnswer(request_id, model, body)
        )
