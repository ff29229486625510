"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixserve.server.generation import Choice, LogprobToken
from radixserve.server.protocol.answer import Answer
from radixserve.server.protocol.logprobs import chat_logprobs


class ChatAnswer(Answer):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.take_text(), "refusal": None}
        whole: dict[str, Any] = {"index": choice.index, "message": message, "logprobs": None}
        if self._request.num_logprobs is not None:
            whole["logprobs"] = self.shape_logprobs(choice, choice.take_logprobs())
        if self._wants_ids:
            whole["token_ids"] = choice.take_ids()
        return whole | self.finish_fields(choice)

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
