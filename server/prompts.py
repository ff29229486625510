"""From validated requests to prompts: chat template, tokenization, and the checks that need the number of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.text.conversation import Message, wrong
from radixserve.engine.text.text_model import TextModel
from radixserve.server.choice import Prompt
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
        messages, tools = _with_tools(messages, tools), []
    return {
        "messages": messages,
        "tools": tools or None,
        "add_generation_prompt": request.opens_turn,
        "continue_final_message": request.continue_final_message,
        "chat_template_kwargs": request.template_variables,
    }


def chat_prompt(text: TextModel, request: ChatPromptRequest, max_model_len: int) -> Prompt:
    _refuse_hopeless(text, [message["content"] for message in request.messages], max_model_len, "messages")
    return checked_prompt(chat_ids(text, request), max_model_len, "messages")


def prompt_end(text: TextModel, prompt: Prompt) -> str:
    """The last characters of a prompt, control tokens included: whether they open or close reasoning."""
    ids = np.frombuffer(prompt.ids[-_END_TOKENS * 4 :], np.dtype("<i4")).tolist()
    return text.tokenizer.decode(ids, skip_special_tokens=False)


def completion_prompts(
    text: TextModel, request: CompletionRequest, max_model_len: int, vocab_size: int
) -> list[Prompt]:
    """Raises ``InvalidRequest`` that says which of several prompts is wrong."""

    def prompt_of(given: str | list[int], param: str) -> Prompt:
        if isinstance(given, str):
            _refuse_hopeless(text, [given], max_model_len, param)
            ids = text.tokenizer.encode(given, add_special_tokens=request.add_special_tokens)
            return checked_prompt(ids, max_model_len, param, given)
        prompt = checked_prompt(given, max_model_len, param)
        if not 0 <= min(given) <= max(given) < vocab_size:
            raise wrong(param, f"token ids must be between 0 and {vocab_size - 1}")
        if not request.echo:
            return prompt
        return replace(prompt, text=text.tokenizer.decode(given, skip_special_tokens=False))

    if len(request.prompts) == 1:
        return [prompt_of(request.prompts[0], "prompt")]
    return [prompt_of(given, f"prompt[{i}]") for i, given in enumerate(request.prompts)]


def checked_prompt(ids: list[int], max_model_len: int, param: str, text: str | None = None) -> Prompt:
    """Raises ``InvalidRequest`` if no token could follow ``ids``."""
    if not ids:
        raise InvalidRequest(f"{param}: the prompt is empty", param=param, code="empty_prompt")
    if len(ids) >= max_model_len:
        raise _too_long(f"has {len(ids)} tokens", max_model_len, param)
    try:
        packed = np.asarray(ids, np.dtype("<i4")).tobytes()
    except OverflowError:
        raise wrong(param, "a token id is out of range") from None
    return Prompt(packed, len(ids), text, param)


def _refuse_hopeless(text: TextModel, pieces: list[str], max_model_len: int, param: str) -> None:
    """Before such a prompt is encoded, which takes long."""
    if sum(map(len, pieces)) > _SUSPICIOUS_CHARS_PER_TOKEN * max_model_len:
        fewest = text.tokenizer.fewest_tokens("".join(pieces))
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


# ---- tools for models whose chat template does not know any: a system text, and calls and results as plain text ----

_SYSTEM = """\
You can call these functions:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON, once for each call:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>
If no function is needed, answer in plain text."""


def _with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Normalized ``messages`` that tell of ``tools`` in the words that ``hermes`` is read by."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _SYSTEM.format(tools=listed)
    plain = [_plain(message) for message in messages]
    if plain[0]["role"] == "system":
        first = plain.pop(0)
        text = f"{first['content']}\n\n{text}" if first["content"] else text
    return [{"role": "system", "content": text}, *plain]


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [_call(call["function"]) for call in calls]
    content = "\n".join([message["content"], *written] if message["content"] else written)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _call(function: Mapping[str, Any]) -> str:
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
