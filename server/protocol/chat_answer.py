"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixserve.server.choice import Choice, LogprobToken
from radixserve.server.output.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from radixserve.server.protocol.chat import ChatRequest
from radixserve.server.protocol.choices import ChoiceAnswer
from radixserve.server.protocol.logprobs import Vocabulary, chat_logprobs


class ChatAnswer(ChoiceAnswer):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, request: ChatRequest, vocabulary: Vocabulary):
        super().__init__(request_id, model, request, vocabulary)
        self._tells_reasoning = request.include_reasoning

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = self._message(choice)
        whole: dict[str, Any] = {"index": choice.index, "message": message, "logprobs": None}
        self.add_tokens(whole, choice)
        return whole | self.finish_fields(choice)

    def _message(self, choice: Choice) -> dict[str, Any]:
        """Content is null only beside tool calls."""
        deltas = choice.take_deltas()
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        calls = [_call(delta, deltas) for delta in deltas if isinstance(delta, CallStart)]
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if reasoning := "".join(delta.text for delta in deltas if isinstance(delta, Reasoning) and self.tells(delta)):
            message |= _reasoning(reasoning)
        return message

    def delta_piece(self, index: int, delta: Delta) -> dict[str, Any]:
        match delta:
            case Content(text):
                return self._delta(index, {"content": text})
            case Reasoning(text):
                return self._delta(index, _reasoning(text))
            case CallStart(call, call_id, name):
                function = {"name": name, "arguments": ""}
                entry = {"index": call, "id": call_id, "type": "function", "function": function}
                return self._delta(index, {"tool_calls": [entry]})
            case CallArguments(call, text):
                return self._delta(index, {"tool_calls": [{"index": call, "function": {"arguments": text}}]})

    def tells(self, delta: Delta) -> bool:
        return not isinstance(delta, Reasoning) or self._tells_reasoning

    def answer_fields(self, choice: Choice) -> dict[str, Any]:
        return self.prompt_fields(choice)

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self._delta(choice.index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._delta(index, {"content": text})

    def ending(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice.index, {}) | self.finish_fields(choice)

    def shape_logprobs(self, choice: Choice, tokens: Sequence[LogprobToken]) -> dict[str, Any]:
        return chat_logprobs(tokens, self._vocabulary)

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _reasoning(text: str) -> dict[str, str]:
    """Under the name that most clients know, and under vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(start: CallStart, deltas: Sequence[Delta]) -> dict[str, Any]:
    arguments = "".join(d.text for d in deltas if isinstance(d, CallArguments) and d.index == start.index)
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}
