"""From a validated request to its answer: what all generating routes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.text.detokenizer import StopStringMatcher
from radixserve.server.choice import Choice, Prompt
from radixserve.server.frontend import Frontend
from radixserve.server.generation import Generation
from radixserve.server.output.plan import OutputPlan, chat_plan
from radixserve.server.prompts import chat_prompt, prompt_end
from radixserve.server.protocol.answers import Answer
from radixserve.server.protocol.chat import ChatRequest
from radixserve.server.protocol.generation_fields import GenerationRequest
from radixserve.server.routes.common import frontend_of, offload
from radixserve.server.sse import EventStream

# How long a stream's headers wait for the engine's first word: a refusal comes at once and is an HTTP status then, but
# a client must not wait for headers through the prefill of somebody's long prompt.
FIRST_WORD_S = 10.0


# Takes the request's id and the name of the model.
NewAnswer = Callable[[str, str], Answer]


async def respond_to_chat(
    request: Request, body: ChatRequest, headers: Mapping[str, str], new_answer: NewAnswer
) -> Response:
    frontend = frontend_of(request)
    frontend.check_model(body.model)
    engine, text = frontend.ready_status(), frontend.text
    sampling = body.sampling(frontend.sampling_defaults, engine.max_model_len, engine.vocab_size)
    prompt = await offload(request, lambda: chat_prompt(text, body, engine.max_model_len))
    formats = frontend.output_formats
    end = prompt_end(text, prompt) if formats.reasoning is not None else ""
    plan = chat_plan(body, formats, end, text.tokenizer.control_texts)
    return await respond(request, body, [prompt], sampling, plan, headers, new_answer)


async def respond(
    request: Request,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    plan: OutputPlan,
    headers: Mapping[str, str],
    new_answer: NewAnswer,
) -> Response:
    """``headers``: of the answer."""
    frontend = frontend_of(request)
    request_id = body.request_id or request.state.request_id
    answer = new_answer(request_id, frontend.check_model(body.model))
    choices = _choices(frontend, body, prompts, sampling, plan)
    generation = Generation(frontend.client, choices, streaming=body.stream)
    try:
        generation.submit(request_id, request.state.tenant, body.priority, body.cache_salt)
        if body.stream:
            await generation.wait_until_started(FIRST_WORD_S)
        else:
            while not generation.done:
                await generation.wait()
        if generation.error is not None:
            raise generation.error
    except BaseException:
        generation.close()
        raise
    if body.stream:
        return EventStream(generation, answer, frontend.config.stream_interval, headers)
    return Response(answer.whole(choices), headers=headers, media_type="application/json")


def _choices(
    frontend: Frontend, body: GenerationRequest, prompts: Sequence[Prompt], sampling: SamplingParams, plan: OutputPlan
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
