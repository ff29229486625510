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
from radixserve.server.routes.answering import Caller, respond, respond_to_chat
from radixserve.server.routes.common import DirectRoute, frontend_of, parsed, takes

router = APIRouter(tags=["generation"], route_class=DirectRoute)

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
CHAT_PREFIX = "chatcmpl-"
COMPLETION_PREFIX = "cmpl-"


@router.post(CHAT_PATH, openapi_extra=takes(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    frontend = frontend_of(request)
    call = await parsed(request, ChatRequest)

    def answer(request_id: str, model: str) -> ChatAnswer:
        return ChatAnswer(CHAT_PREFIX + request_id, model, call.body, frontend.text.tokenizer)

    return await respond_to_chat(request, call.body, call.headers, answer)


@router.post(COMPLETION_PATH, openapi_extra=takes(CompletionRequest))
async def create_completion(request: Request) -> Response:
    frontend = frontend_of(request)
    call = await parsed(request, CompletionRequest)
    body, model = call.body, frontend.check_model(call.body.model)
    max_model_len, vocab_size, text = frontend.max_model_len, frontend.vocab_size, frontend.text
    sampling = body.sampling(frontend.sampling_defaults, max_model_len, vocab_size)
    num_bytes = len(await request.body())
    prompts = await frontend.offload(num_bytes, lambda: completion_prompts(text, body, max_model_len, vocab_size))
    request_id = body.request_id or request.state.request_id
    answer = CompletionAnswer(COMPLETION_PREFIX + request_id, model, body, text.tokenizer)
    caller = Caller(request_id, request.state.tenant, call.headers)
    wanted = wanted_format(body)
    plan = OutputPlan(grammar_text(wanted.format, wanted.field), wanted.field) if wanted else OutputPlan()
    return await respond(frontend, body, prompts, sampling, answer, caller, plan)
