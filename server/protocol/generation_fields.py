"""The fields that all generating routes share, those of both kinds of completions, and the sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.sampling_params import MAX_LOGPROBS, RANGES, SamplingParams
from radixserve.engine.text.conversation import wrong
from radixserve.server.protocol.fields import Harmless, Int64, LogitBias, Name, RequestModel, Stop, only
from radixserve.server.protocol.schemas import OBJECT, STRING, any_of
from radixserve.server.protocol.structured import RESPONSE_FORMAT_SCHEMA

MAX_CHOICES = 128
_PARAMETERS = SamplingParams.__struct_fields__


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Harmless = None


def _ranged(name: str, default: float | None) -> Any:
    """A field whose range ``SamplingParams`` checks; here it is only documented."""
    low, high = RANGES[name]
    return Field(default, json_schema_extra={"minimum": low, "maximum": high})


class SamplingFields(RequestModel):
    """What every API that generates has, some of it as an extension. Ranges are checked by ``SamplingParams``, for
    every way into the engine alike."""

    model: str | None = None
    stream: bool = False
    seed: Int64 | None = None
    min_tokens: Int64 = 0
    temperature: float | None = _ranged("temperature", None)
    top_p: float | None = _ranged("top_p", None)
    top_k: Int64 | None = None
    min_p: float | None = _ranged("min_p", None)
    frequency_penalty: float = _ranged("frequency_penalty", 0.0)
    presence_penalty: float = _ranged("presence_penalty", 0.0)
    repetition_penalty: float | None = None
    logit_bias: LogitBias = {}
    stop_token_ids: list[Int64] = []
    ignore_eos: bool = False
    cache_salt: str = Field("", max_length=1024, description="Requests with different salts share no cached prefix")
    priority: Int64 = Field(0, description="Lower runs earlier (--schedule-policy priority)")
    request_id: Name | None = None

    @property
    def given_sampling_fields(self) -> dict[str, Any]:
        given = self.model_fields_set & SamplingFields.model_fields.keys()
        return {name: getattr(self, name) for name in given}


class OpenAiHints(RequestModel):
    """What OpenAI's servers take note of beside the request."""

    user: Harmless = None
    store: Harmless = None
    service_tier: Harmless = None
    safety_identifier: Harmless = None
    prompt_cache_key: Harmless = None
    prompt_cache_retention: Harmless = None
    prompt_cache_options: Harmless = None


class GenerationRequest(SamplingFields, OpenAiHints):
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(
        None, json_schema_extra={"minimum": 0}, description="At least 1. Default: the room left in the context"
    )
    stop: Stop = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False

    metadata: Harmless = None
    response_format: Annotated[dict[str, Any], WithJsonSchema(RESPONSE_FORMAT_SCHEMA)] | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice, grammar, structural_tag"
    )
    guided_json: Annotated[Any, WithJsonSchema(any_of(OBJECT, STRING))] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    use_beam_search: Annotated[object, only(False)] = None
    allowed_token_ids: Annotated[object, only()] = None
    bad_words: Annotated[object, only([])] = None
    truncate_prompt_tokens: Annotated[object, only()] = None

    @property
    def token_limit_field(self) -> str:
        return "max_tokens"

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, None for the room left."""
        return self.max_tokens

    @property
    def scores_only(self) -> bool:
        """Whether only the prompt is of interest, and no generated token."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each token's logprob; None: no logprobs."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs

    def sampling(self, defaults: Mapping[str, float], max_model_len: int, vocab_size: int) -> SamplingParams:
        """Raises ``InvalidRequest``. ``defaults``: what the model's authors recommend for absent fields."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        self._check_token_ids(vocab_size)
        limit = self.token_limit
        if limit is not None and limit > max_model_len:
            field = self.token_limit_field
            raise InvalidRequest(f"{field} is above the model's context length of {max_model_len} tokens", param=field)
        given = {name: getattr(self, name) for name in self.model_fields_set.intersection(_PARAMETERS)}
        chosen: dict[str, Any] = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        if "top_k" in chosen:
            chosen["top_k"] = min(int(chosen["top_k"]), vocab_size)
        chosen |= {
            "max_tokens": limit,
            "min_tokens": self.min_tokens if limit else min(self.min_tokens, max_model_len),
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
        }
        return SamplingParams(**chosen)

    def _check_token_ids(self, vocab_size: int) -> None:
        for field, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise wrong(field, f"{token} is not a token id of this model, which has {vocab_size}")
