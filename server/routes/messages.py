"""/v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.errors import MESSAGES_PATH, blaming
from radixserve.server.prompts import chat_ids
from radixserve.server.protocol.messages import FIELD_NAMES, CountTokensRequest, MessagesRequest
from radixserve.server.protocol.messages_answer import MessagesAnswer
from radixserve.server.routes.answering import respond_to_chat
from radixserve.server.routes.common import DirectRoute, frontend_of, json_response, offload, parsed, takes

router = APIRouter(tags=["generation"], route_class=DirectRoute)


@router.post(MESSAGES_PATH, openapi_extra=takes(MessagesRequest))
async def create_message(request: Request) -> Response:
    call = await parsed(request, MessagesRequest)
    max_model_len = frontend_of(request).max_model_len
    with blaming(FIELD_NAMES):
        chat = await offload(request, lambda: call.body.for_chat(max_model_len))
        return await respond_to_chat(request, chat, call.headers, MessagesAnswer)


@router.post(f"{MESSAGES_PATH}/count_tokens", openapi_extra=takes(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """Of the prompt that such a request would have."""
    call = await parsed(request, CountTokensRequest)
    frontend = frontend_of(request)
    frontend.check_model(call.body.model)
    text = frontend.text
    with blaming(FIELD_NAMES):
        ids = await offload(request, lambda: chat_ids(text, call.body.for_chat()))
    return json_response({"input_tokens": len(ids)}, headers=call.headers)
