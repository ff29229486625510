"""All routes that generate: /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.errors import MESSAGES_PATH, blaming
from radixserve.server.output.plan import OutputPlan
from radixserve.server.prompts import chat_ids, completion_prompts
from radixserve.server.protocol import messages, responses
from radixserve.server.protocol.chat import ChatAnswer, ChatRequest
from radixserve.server.protocol.completions import CompletionAnswer, CompletionRequest
from radixserve.server.protocol.structured import grammar_text, wanted_format
from radixserve.server.routes.answering import respond, respond_to_chat
from radixserve.server.routes.common import DirectRoute, frontend_of, json_response, offload, parsed, takes

router = APIRouter(tags=["generation"], route_class=DirectRoute)

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
STREAMING_PATHS = (CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH)


@router.post(CHAT_PATH, openapi_extra=takes(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    frontend = frontend_of(request)
    body, headers = await parsed(request, ChatRequest)
    return await respond_to_chat(
        request, body, headers, lambda request_id, model: ChatAnswer(request_id, model, body, frontend.text.tokenizer)
    )


@router.post(COMPLETION_PATH, openapi_extra=takes(CompletionRequest))
async def create_completion(request: Request) -> Response:
    frontend = frontend_of(request)
    body, headers = await parsed(request, CompletionRequest)
    frontend.check_model(body.model)
    engine, text = frontend.ready_status(), frontend.text
    sampling = body.sampling(frontend.sampling_defaults, engine.max_model_len, engine.vocab_size)
    prompts = await offload(request, lambda: completion_prompts(text, body, engine.max_model_len, engine.vocab_size))
    wanted = wanted_format(body)
    plan = OutputPlan(grammar_text(wanted.format, wanted.field), wanted.field) if wanted else OutputPlan()

    def answer(request_id: str, model: str) -> CompletionAnswer:
        return CompletionAnswer(request_id, model, body, text.tokenizer)

    return await respond(request, body, prompts, sampling, plan, headers, answer)


@router.post(RESPONSES_PATH, openapi_extra=takes(responses.ResponsesRequest))
async def create_response(request: Request) -> Response:
    """OpenAI's newer form of a chat, without anything stored."""
    body, headers = await parsed(request, responses.ResponsesRequest)
    with blaming(responses.FIELD_NAMES):
        chat = await offload(request, body.for_chat)
        return await respond_to_chat(
            request, chat, headers, lambda request_id, model: responses.ResponsesAnswer(request_id, model, body)
        )


@router.post(MESSAGES_PATH, openapi_extra=takes(messages.MessagesRequest))
async def create_message(request: Request) -> Response:
    """Anthropic's form of a chat."""
    body, headers = await parsed(request, messages.MessagesRequest)
    max_model_len = frontend_of(request).ready_status().max_model_len
    with blaming(messages.FIELD_NAMES):
        chat = await offload(request, lambda: body.for_chat(max_model_len))
        return await respond_to_chat(request, chat, headers, messages.MessagesAnswer)


@router.post(f"{MESSAGES_PATH}/count_tokens", openapi_extra=takes(messages.CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """Of the prompt that such a request would have."""
    frontend = frontend_of(request)
    body, headers = await parsed(request, messages.CountTokensRequest)
    frontend.check_model(body.model)
    text = frontend.text
    with blaming(messages.FIELD_NAMES):
        ids = await offload(request, lambda: chat_ids(text, body.for_chat()))
    return json_response({"input_tokens": len(ids)}, headers=headers)
