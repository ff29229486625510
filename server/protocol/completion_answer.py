"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixserve.server.choice import Choice, LogprobToken
from radixserve.server.protocol.choices import ChoiceAnswer, prompt_ids
from radixserve.server.protocol.completions import CompletionRequest
from radixserve.server.protocol.logprobs import CompletionLogprobs, Vocabulary


class CompletionAnswer(ChoiceAnswer):
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, request_id: str, model: str, request: CompletionRequest, vocabulary: Vocabulary):
        super().__init__(request_id, model, request, vocabulary)
        self._echo = request.echo

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = self._echoed(choice) + choice.take_text()
        logprobs = self._logprobs(choice, choice.take_logprobs(), with_prompt=self._echo)
        whole = {"index": choice.index, "text": text, "logprobs": logprobs}
        if self._wants_ids:
            whole["token_ids"] = choice.take_ids()
        return whole | self.finish_fields(choice) | self.prompt_fields(choice)

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        fields = self.prompt_fields(choice)
        if not (self._echo or fields):
            return None
        logprobs = self._logprobs(choice, [], with_prompt=True) if self._echo else None
        return self.piece(choice.index, self._echoed(choice)) | {"logprobs": logprobs} | fields

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def ending(self, choice: Choice) -> dict[str, Any]:
        return self.piece(choice.index, "") | self.finish_fields(choice)

    def shape_logprobs(self, choice: Choice, tokens: Sequence[LogprobToken]) -> dict[str, Any] | None:
        return self._logprobs(choice, tokens, with_prompt=False)

    def _logprobs(self, choice: Choice, tokens: Sequence[LogprobToken], *, with_prompt: bool) -> dict[str, Any] | None:
        if self._request.num_logprobs is None:
            return None
        logprobs = CompletionLogprobs(self._vocabulary)
        if with_prompt:
            logprobs.add_prompt(prompt_ids(choice), choice.prompt_logprobs)
        logprobs.add(tokens, len(self._echoed(choice)))
        return logprobs.as_dict()

    def _echoed(self, choice: Choice) -> str:
        return (choice.prompt.text or "") if self._echo else ""
