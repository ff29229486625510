"""From validated requests to prompts: chat template, tokenization, and the checks that need the number of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.text.text_model import TextModel
from radixserve.server.choice import Prompt
from radixserve.server.output.tool_prompt import with_tools
from radixserve.server.protocol.chat import ChatPromptRequest
from radixserve.server.protocol.completions import CompletionRequest

# Nobody writes a text of so many characters a token, so it is worth a look before it is encoded.
_SUSPICIOUS_CHARS_PER_TOKEN = 16
_END_TOKENS = 16


def chat_text(text: TextModel, request: ChatPromptRequest) -> str:
    """The rendered prompt. Raises ``InvalidRequest`` with what the template says against it."""
    return text.render_chat(**_chat(text, request))


def chat_ids(text: TextModel, request: ChatPromptRequest) -> list[int]:
    """The prompt's token ids; text of control tokens in messages is only text."""
    return text.encode_chat(**_chat(text, request))


def _chat(text: TextModel, request: ChatPromptRequest) -> dict[str, Any]:
    messages, tools = request.messages, request.prompt_tools
    if tools and text.template is not None and not text.template.uses_tools:
        messages, tools = with_tools(messages, tools), []
    return {
        "messages": messages,
        "tools": tools or None,
        "add_generation_prompt": request.opens_turn,
        "continue_final_message": request.continue_final_message,
        "chat_template_kwargs": request.template_variables,
    }


def chat_prompt(text: TextModel, request: ChatPromptRequest, max_model_len: int) -> Prompt:
    num_chars = sum(len(message["content"]) for message in request.messages)
    if num_chars > _SUSPICIOUS_CHARS_PER_TOKEN * max_model_len:
        _refuse_hopeless(text, "".join(message["content"] for message in request.messages), max_model_len, "messages")
    return checked_prompt(chat_ids(text, request), max_model_len, "messages")


def prompt_end(text: TextModel, prompt: Prompt) -> str:
    """The last characters of a prompt, control tokens included: whether they open or close reasoning."""
    ids = np.frombuffer(prompt.ids[-_END_TOKENS * 4 :], np.dtype("<i4")).tolist()
    return text.tokenizer.decode(ids, skip_special_tokens=False)


def completion_prompts(
    text: TextModel, request: CompletionRequest, max_model_len: int, vocab_size: int
) -> list[Prompt]:
    """Raises ``InvalidRequest`` that says which of several prompts is wrong."""
    params = ["prompt"] if len(request.prompts) == 1 else [f"prompt[{i}]" for i in range(len(request.prompts))]
    return [
        _completion_prompt(text, request, prompt, param, max_model_len, vocab_size)
        for prompt, param in zip(request.prompts, params, strict=True)
    ]


def _completion_prompt(
    text: TextModel,
    request: CompletionRequest,
    prompt: str | list[int],
    param: str,
    max_model_len: int,
    vocab_size: int,
) -> Prompt:
    if isinstance(prompt, str):
        if len(prompt) > _SUSPICIOUS_CHARS_PER_TOKEN * max_model_len:
            _refuse_hopeless(text, prompt, max_model_len, param)
        ids = text.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        return checked_prompt(ids, max_model_len, param, prompt)
    checked = checked_prompt(prompt, max_model_len, param)
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise InvalidRequest(f"{param}: token ids must be between 0 and {vocab_size - 1}", param=param)
    if not request.echo:
        return checked
    return replace(checked, text=text.tokenizer.decode(prompt, skip_special_tokens=False))


def checked_prompt(ids: list[int], max_model_len: int, param: str, text: str | None = None) -> Prompt:
    """Raises ``InvalidRequest`` if no token could follow ``ids``."""
    if not ids:
        raise InvalidRequest(f"{param}: the prompt is empty", param=param, code="empty_prompt")
    if len(ids) >= max_model_len:
        raise _too_long(f"has {len(ids)} tokens", max_model_len, param)
    try:
        packed = np.asarray(ids, np.dtype("<i4")).tobytes()
    except OverflowError:
        raise InvalidRequest(f"{param}: a token id is out of range", param=param) from None
    return Prompt(packed, len(ids), text, param)


def _refuse_hopeless(text: TextModel, prompt: str, max_model_len: int, param: str) -> None:
    fewest = text.tokenizer.fewest_tokens(prompt)
    if fewest >= max_model_len:
        raise _too_long(f"has at least {fewest} tokens", max_model_len, param)


def _too_long(how_long: str, max_model_len: int, param: str) -> InvalidRequest:
    which = param if "[" in param else "the prompt"
    return InvalidRequest(
        f"this model's context length is {max_model_len} tokens, but {which} {how_long} "
        "and needs room for at least one more; shorten it",
        param=param,
        code="context_length_exceeded",
    )
