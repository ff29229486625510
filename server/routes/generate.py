"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.output.plan import OutputPlan
from radixserve.server.prompts import completion_prompts
from radixserve.server.protocol.chat import ChatRequest
from radixserve.server.protocol.chat_answer import ChatAnswer
from radixserve.server.protocol.completion_answer import CompletionAnswer
from radixserve.server.protocol.completions import CompletionRequest
from radixserve.server.protocol.structured import grammar_text, wanted_format
from radixserve.server.routes.answering import respond, respond_to_chat
from radixserve.server.routes.common import DirectRoute, frontend_of, offload, parsed, takes

router = APIRouter(tags=["generation"], route_class=DirectRoute)

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"


@router.post(CHAT_PATH, openapi_extra=takes(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    frontend = frontend_of(request)
    call = await parsed(request, ChatRequest)

    def answer(request_id: str, model: str) -> ChatAnswer:
        return ChatAnswer(request_id, model, call.body, frontend.text.tokenizer)

    return await respond_to_chat(request, call.body, call.headers, answer)


@router.post(COMPLETION_PATH, openapi_extra=takes(CompletionRequest))
async def create_completion(request: Request) -> Response:
    frontend = frontend_of(request)
    call = await parsed(request, CompletionRequest)
    body = call.body
    frontend.check_model(body.model)
    max_model_len, vocab_size, text = frontend.max_model_len, frontend.vocab_size, frontend.text
    sampling = body.sampling(frontend.sampling_defaults, max_model_len, vocab_size)
    prompts = await offload(request, lambda: completion_prompts(text, body, max_model_len, vocab_size))
    wanted = wanted_format(body)
    plan = OutputPlan(grammar_text(wanted.format, wanted.field), wanted.field) if wanted else OutputPlan()

    def answer(request_id: str, model: str) -> CompletionAnswer:
        return CompletionAnswer(request_id, model, body, text.tokenizer)

    return await respond(request, body, prompts, sampling, plan, call.headers, answer)
