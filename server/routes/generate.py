"""All routes that generate: /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.engine.messages import EngineStatus
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.text.detokenizer import StopStringMatcher
from radixserve.server.choice import Choice, Prompt
from radixserve.server.errors import MESSAGES_PATH
from radixserve.server.frontend import Frontend
from radixserve.server.generation import EventStream, Generation
from radixserve.server.output.plan import OutputPlan, chat_plan, completion_plan
from radixserve.server.prompts import chat_ids, chat_prompt, completion_prompts, prompt_end
from radixserve.server.protocol import messages, responses
from radixserve.server.protocol.answers import Answer
from radixserve.server.protocol.chat import ChatAnswer, ChatRequest
from radixserve.server.protocol.completions import CompletionAnswer, CompletionRequest
from radixserve.server.routes.common import DirectRoute, frontend_of, json_response, offload

router = APIRouter(tags=["generation"], route_class=DirectRoute)

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
STREAMING_PATHS = (CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH)

# How long a stream's headers wait for the engine's first word: a refusal comes at once and is an HTTP status then, but
# a client must not wait for headers through the prefill of somebody's long prompt.
FIRST_WORD_S = 10.0


@router.post(CHAT_PATH)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    frontend = frontend_of(request)
    return await _respond(
        request, body, lambda request_id, model: ChatAnswer(request_id, model, body, frontend.text.tokenizer)
    )


@router.post(COMPLETION_PATH)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    frontend = frontend_of(request)
    return await _respond(
        request, body, lambda request_id, model: CompletionAnswer(request_id, model, body, frontend.text.tokenizer)
    )


@router.post(RESPONSES_PATH)
async def create_response(request: Request, body: responses.ResponsesRequest) -> Response:
    """OpenAI's newer form of a chat, without anything stored."""
    chat = await offload(request, body.for_chat)
    return await _respond(request, chat, lambda request_id, model: responses.ResponsesAnswer(request_id, model, body))


@router.post(MESSAGES_PATH)
async def create_message(request: Request, body: messages.MessagesRequest) -> Response:
    """Anthropic's form of a chat."""
    max_model_len = frontend_of(request).ready_status().max_model_len
    chat = await offload(request, lambda: body.for_chat(max_model_len))
    return await _respond(request, chat, messages.MessagesAnswer)


@router.post(f"{MESSAGES_PATH}/count_tokens")
async def count_tokens(request: Request, body: messages.CountTokensRequest) -> Response:
    """Of the prompt that such a request would have."""
    text = frontend_of(request).text
    ids = await offload(request, lambda: chat_ids(text, body.for_chat()))
    return json_response({"input_tokens": len(ids)})


async def _respond(
    request: Request, body: ChatRequest | CompletionRequest, new_answer: Callable[[str, str], Answer]
) -> Response:
    """``new_answer`` takes the request's id and the name of the model."""
    frontend = frontend_of(request)
    model, engine = frontend.check_model(body.model), frontend.ready_status()
    sampling = body.sampling(frontend.sampling_defaults, engine.max_model_len, engine.vocab_size)
    prompts, plan = await offload(request, lambda: _prompts_and_plan(frontend, body, engine))
    request_id = body.request_id or request.state.request_id
    answer = new_answer(request_id, model)
    choices = _choices(frontend, body, prompts, sampling, plan)
    generation = Generation(frontend.client, choices, streaming=body.stream)
    try:
        generation.submit(request_id, request.state.tenant, body.priority, body.cache_salt)
        if body.stream and not generation.started:
            await generation.wait(FIRST_WORD_S)
        if not body.stream:
            while not generation.done:
                await generation.wait()
        if generation.error is not None:
            raise generation.error
    except BaseException:
        generation.close()
        raise
    if body.stream:
        return EventStream(generation, answer, frontend.config.stream_interval)
    return Response(answer.whole(choices), media_type="application/json")


def _prompts_and_plan(
    frontend: Frontend, body: ChatRequest | CompletionRequest, engine: EngineStatus
) -> tuple[list[Prompt], OutputPlan]:
    text = frontend.text
    if isinstance(body, CompletionRequest):
        return completion_prompts(text, body, engine.max_model_len, engine.vocab_size), completion_plan(body)
    prompt, formats = chat_prompt(text, body, engine.max_model_len), frontend.output_formats
    end = prompt_end(text, prompt) if formats.reasoning is not None else ""
    return [prompt], chat_plan(body, formats, end, text.tokenizer.control_texts)


def _choices(
    frontend: Frontend,
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    plan: OutputPlan,
) -> list[Choice]:
    """``n`` for each prompt, in OpenAI's order."""
    tokenizer, max_model_len = frontend.text.tokenizer, frontend.ready_status().max_model_len
    include_stop = body.include_stop_str_in_output
    if plan.grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=plan.grammar)
    limited = {prompt: _within_room(sampling, max_model_len - prompt.num_tokens) for prompt in set(prompts)}
    return [
        Choice(
            index,
            prompt,
            tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens, shown=plan.markers),
            StopStringMatcher(body.stop, include_stop_str_in_output=include_stop) if body.stop else None,
            _with_seed(limited[prompt], index % body.n),
            parser=plan.new_parser(),
            grammar_field=plan.field,
            include_stop=include_stop,
            prompt_only=body.scores_only,
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(body.n))
    ]


def _within_room(sampling: SamplingParams, room: int) -> SamplingParams:
    if sampling.max_tokens is not None and sampling.max_tokens <= room:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))


def _with_seed(sampling: SamplingParams, offset: int) -> SamplingParams:
    """Choices of one seeded request differ, and do so in the same way every time."""
    if sampling.seed is None or offset == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + offset + 2**63) % 2**64 - 2**63)
