"""/v1/completions: its requests and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.sampling_params import MAX_LOGPROBS
from radixserve.server.choice import Choice, LogprobToken
from radixserve.server.output.deltas import Content, Delta
from radixserve.server.protocol.answers import ChoiceAnswer, prompt_ids
from radixserve.server.protocol.fields import only
from radixserve.server.protocol.generation_fields import GenerationRequest
from radixserve.server.protocol.logprobs import CompletionLogprobs
from radixserve.server.protocol.schemas import NON_EMPTY, any_of, list_of

MAX_PROMPTS = 1024

_TOKENS = list_of({"type": "integer", "minimum": 0}, at_least=1)


def _as_list(value: object) -> object:
    """One text or one list of token ids becomes a list of one."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and isinstance(value[0], int):
        return [value]
    return value


def _is_prompt(prompt: object) -> bool:
    # By set, not one by one with isinstance: lists of millions of ids come in, and a bool is not an id.
    return isinstance(prompt, str) or (isinstance(prompt, list) and set(map(type, prompt)) <= {int})


def _check_prompts(value: object) -> object:
    prompts = _as_list(value)
    if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"must hold 1 to {MAX_PROMPTS} prompts")
    return prompts


# The validator has looked at every id: pydantic need not do it again.
Prompts = Annotated[
    object,
    BeforeValidator(_check_prompts),
    WithJsonSchema(any_of(NON_EMPTY, _TOKENS, list_of(NON_EMPTY, at_least=1), list_of(_TOKENS, at_least=1))),
]


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    suffix: Annotated[object, only("")] = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest("best_of: is not supported by this server, except equal to n", param="best_of")
        if self.n * len(self.prompts) > MAX_PROMPTS:
            raise InvalidRequest(f"n: more than {MAX_PROMPTS} choices in one request", param="n")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        assert isinstance(self.prompt, list)
        return self.prompt

    @property
    def scores_only(self) -> bool:
        """``max_tokens: 0`` with echo: only the prompt's logprobs are wanted."""
        return self.echo and self.max_tokens == 0

    @property
    def token_limit(self) -> int | None:
        # The engine gives at least one token; the answer leaves it out.
        return 1 if self.scores_only else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs


class CompletionAnswer(ChoiceAnswer):
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    _request: CompletionRequest

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = self._echoed(choice) + choice.take_text()
        logprobs = self._logprobs(choice, choice.take_logprobs(), with_prompt=self._request.echo)
        whole = {"index": choice.index, "text": text, "logprobs": logprobs}
        if self._wants_ids:
            whole["token_ids"] = choice.take_ids()
        return whole | self.finish_fields(choice) | self.prompt_fields(choice)

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        echo, fields = self._request.echo, self.prompt_fields(choice)
        if not (echo or fields):
            return None
        logprobs = self._logprobs(choice, [], with_prompt=True) if echo else None
        return self.piece(choice.index, Content(self._echoed(choice))) | {"logprobs": logprobs} | fields

    def piece(self, index: int, delta: Delta | None) -> dict[str, Any]:
        text = delta.text if isinstance(delta, Content) else ""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def shape_logprobs(self, choice: Choice, tokens: Sequence[LogprobToken]) -> dict[str, Any] | None:
        return self._logprobs(choice, tokens, with_prompt=False)

    def _logprobs(self, choice: Choice, tokens: Sequence[LogprobToken], *, with_prompt: bool) -> dict[str, Any] | None:
        if self._request.num_logprobs is None:
            return None
        logprobs = CompletionLogprobs(self._vocabulary)
        if with_prompt:
            logprobs.add_prompt(prompt_ids(choice), choice.prompt_logprobs)
        logprobs.add(tokens, len(self._echoed(choice)))
        return logprobs.lists

    def _echoed(self, choice: Choice) -> str:
        return (choice.prompt.text or "") if self._request.echo else ""
