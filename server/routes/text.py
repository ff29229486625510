"""/tokenize, /detokenize and /v1/chat/completions/render: the text side of the model by itself."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.text.conversation import wrong
from radixserve.server.frontend import Frontend
from radixserve.server.prompts import chat_ids, chat_text
from radixserve.server.protocol.chat import ChatPromptRequest, Messages
from radixserve.server.protocol.fields import Int64, RequestModel
from radixserve.server.routes.common import DirectRoute, frontend_of, json_response, offload

router = APIRouter(tags=["text"], route_class=DirectRoute)


class TokenizeRequest(ChatPromptRequest):
    """``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    messages: Messages = []


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[Int64]
    skip_special_tokens: bool = False


class RenderRequest(ChatPromptRequest):
    model: str | None = None


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    frontend = frontend_of(request)
    text = frontend.text

    def encode() -> list[int]:
        if body.prompt is None and not body.messages:
            raise InvalidRequest("prompt or messages is required", param="prompt")
        if body.prompt is None:
            return chat_ids(text, body)
        return text.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)

    ids = await offload(request, encode)
    strings = [text.tokenizer.token(token) for token in ids] if body.return_token_strs else None
    counts = {"count": len(ids), "max_model_len": _context_length(frontend)}
    return json_response({**counts, "tokens": ids, "token_strs": strings})


@router.post("/v1/embeddings")
async def embeddings(_: Request) -> Response:
    raise InvalidRequest(
        "this server's models generate text and give no embeddings: ask a server of an embedding model"
    )


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    tokenizer = frontend_of(request).text.tokenizer

    def decode() -> str:
        for token in body.tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise wrong("tokens", f"{token} is not a token id")
        return tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)

    return json_response({"prompt": await offload(request, decode)})


@router.post("/v1/chat/completions/render")
async def render(request: Request, body: RenderRequest) -> Response:
    """The prompt that a chat request would have, as text and as token ids."""
    text = frontend_of(request).text
    rendered, ids = await offload(request, lambda: (chat_text(text, body), chat_ids(text, body)))
    return json_response({"prompt": rendered, "prompt_token_ids": ids, "count": len(ids)})


def _context_length(frontend: Frontend) -> int:
    status = frontend.client.status
    return status.max_model_len if status and status.max_model_len else frontend.text.spec.max_position
