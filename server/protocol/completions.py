"""The request of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.sampling_params import MAX_LOGPROBS
from radixserve.server.protocol.fields import only
from radixserve.server.protocol.generation import GenerationRequest
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
