"""How the next token of one request is chosen, and when the request ends. No torch."""

import math

import msgspec

from radixserve.engine.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 1 << 17
RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping rules of one request; validated on construction.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 keeps the whole vocabulary. ``max_tokens`` None means the room
    left in the context. ``seed`` None draws one at admission; with a seed the tokens do not depend on the batch.
    ``logprobs`` is the number of alternatives reported beside the chosen token (0: only the chosen one, None: none).
    ``grammar``: what the output must match, as ``engine/structured.py`` writes it.
    ``stop`` (strings) is honoured by whoever turns ids into text; the engine itself knows token ids only. At run time a
    list is as good as a tuple, and so is one string.
    Raises ``InvalidRequest`` that names the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        try:
            self._check()
        except (TypeError, AttributeError) as error:
            try:
                msgspec.convert(msgspec.structs.asdict(self), type(self))
            except msgspec.ValidationError as wrong:  # which names the field
                raise InvalidRequest(f"sampling rules: {wrong}", param="sampling_params") from error
            raise

    def _check(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        msgspec.structs.force_setattr(self, "stop", stop)
        _at_least("max_tokens", self.max_tokens, 1)
        _at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not be larger than max_tokens", param="min_tokens")
        for name, (low, high) in RANGES.items():
            _between(name, getattr(self, name), low, high)
        _at_least("top_k", self.top_k, -1)
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise InvalidRequest("repetition_penalty must be above 0 and at most 10", param="repetition_penalty")
        for token, bias in self.logit_bias.items():
            if token < 0:
                raise InvalidRequest(f"logit_bias: {token} is not a token id", param="logit_bias")
            _between("logit_bias", bias, -100.0, 100.0)
        if "" in self.stop:
            raise InvalidRequest("stop must not contain an empty string", param="stop")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequest(f"{name} must be between 0 and {MAX_LOGPROBS}", param=name)
        if self.grammar is not None and len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"grammar has more than {MAX_GRAMMAR_CHARS} characters", param="grammar")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, not {value:g}", param=name)


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise InvalidRequest(f"{name} must be at least {low}, not {value}", param=name)
