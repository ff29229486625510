"""One request inside the engine, and the reasons to refuse one. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from radixserve.engine.constraint import TokenConstraint, forbid
from radixserve.engine.messages import FinishReason, Rejected, Submit, TokenLogprobs
from radixserve.engine.step import Int32s
from radixserve.kvcache.manager import Lease

# A frontend's socket identity and the uid that is unique within it.
RequestKey = tuple[bytes, int]

# Requests that share a prefix worth waiting for have the same first tokens, so many of them.
PREFIX_KEY_TOKENS = 16

_RETRY_AFTER_S = 1.0

# What a generated token costs a tenant, in prompt tokens: a step reads all weights for each (as in arXiv 2401.00588).
_OUTPUT_COST = 2


@dataclass(slots=True, eq=False)
class Request:
    """A request from its acceptance to its final event; written by the scheduler only.

    ``arrival`` counts accepted requests. ``max_total`` is the number of tokens, prompt included, at which it ends with
    LENGTH. While it runs it has a ``lease``, and ``known`` are the tokens that its prefill computes: the prompt, and
    after a retraction or a jump the output so far. ``computed`` of them are computed by the steps launched so far.
    """

    key: RequestKey
    submit: Submit
    prompt: Int32s
    arrival: int
    arrived_at: float  # in seconds, of the scheduler's clock
    seed: int
    max_total: int
    stops_on: frozenset[int]
    constraint: TokenConstraint | None = None

    output: list[int] = field(default_factory=list)
    lease: Lease | None = None
    known: Int32s = field(default_factory=lambda: np.empty(0, np.int32))
    computed: int = 0
    set_up: bool = False  # the runner knows ``known`` and the rules, or will by a step launched
    published: int = 0  # tokens of ``known`` that other requests find in the prefix cache
    cached_tokens: int | None = None  # by its first admission
    admitted_at: float = 0.0  # first admission; of the same clock
    charged: int = 0  # of ``cost``, to its tenant
    overtaken: int = 0  # requests of its tenant that arrived later and were admitted before it (policy lpm)
    yielded: bool = False  # has given its seat to another tenant once
    ended: bool = False  # its final event is out; a launched step may still hold its row
    sound: bool = True  # false once a step that wrote its KV failed
    waits_for: Request | None = None  # computes a prefix right now that this request shares ...
    shared_len: int = 0  # ... and which is so many tokens long
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def uid(self) -> int:
        return self.key[1]

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def total_len(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def cost(self) -> int:
        """What was done for it so far, in prompt tokens; but not what was computed again after a retraction."""
        if self.cached_tokens is None:
            return 0
        return self.prompt_len - self.cached_tokens + _OUTPUT_COST * len(self.output)

    @property
    def unfinished(self) -> int:
        """Known tokens that no launched step computes yet."""
        return len(self.known) - self.computed

    @property
    def prefix_key(self) -> tuple[str, bytes]:
        """Equal for all requests with which this one could share a prefix worth waiting for."""
        return self.submit.namespace, self.prompt[:PREFIX_KEY_TOKENS].tobytes()

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether every prompt position must still be computed, so that cached KV is of no use."""
        return self.submit.sampling.prompt_logprobs is not None and not self.output

    @property
    def may_jump(self) -> bool:
        """Whether forced tokens may be appended without a step for each: not if somebody wants to see the logits of
        each step, or to change them."""
        rules = self.submit.sampling
        return self.constraint is not None and rules.logprobs is None and not rules.logit_bias

    def all_tokens(self) -> Int32s:
        return np.concatenate([self.prompt, np.array(self.output, np.int32)]) if self.output else self.prompt

    def fill_mask(self, words: Int32s) -> None:
        """Which tokens may come next, by its constraint. Raises ``ConstraintFailed``."""
        assert self.constraint is not None
        self.constraint.fill_mask(words)
        if len(self.output) < self.submit.sampling.min_tokens:
            forbid(words, self.stops_on)

    def forced(self) -> list[int]:
        """Which tokens must come next, by its constraint, before any that may end it. Raises ``ConstraintFailed``."""
        assert self.constraint is not None
        return list(takewhile(lambda token: token not in self.stops_on, self.constraint.forced()))

    def take(self, token: int) -> FinishReason | None:
        """Append ``token`` to the output: whether that ends the request. Raises ``ConstraintFailed``."""
        self.output.append(token)
        if token in self.stops_on and len(self.output) > self.submit.sampling.min_tokens:
            return FinishReason.STOP
        if self.constraint is not None and self.constraint.accept(token):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output) >= self.max_total - len(self.prompt) else None


def refusal(submit: Submit, prompt: Int32s, max_model_len: int, pool_tokens: int, vocab_size: int) -> Rejected | None:
    """Why ``submit`` can never run here, or None. ``pool_tokens`` is what the whole KV pool holds."""
    uid, length = submit.uid, len(prompt)
    if length == 0:
        return Rejected(uid, "the prompt is empty", code="empty_prompt", param="prompt")
    if length + 1 > max_model_len:
        return _too_long(uid, length, f"this model's context length is {max_model_len} tokens")
    if length + 1 > pool_tokens:
        return _too_long(uid, length, f"this server's KV cache holds {pool_tokens} tokens")
    if not 0 <= int(prompt.min()) <= int(prompt.max()) < vocab_size:
        message = f"prompt token ids must be between 0 and {vocab_size - 1}"
        return Rejected(uid, message, code="invalid_token_id", param="prompt")
    for name, tokens in (
        ("logit_bias", tuple(submit.sampling.logit_bias)),
        ("stop_token_ids", submit.sampling.stop_token_ids),
    ):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            message = f"{name}: token ids must be between 0 and {vocab_size - 1}"
            return Rejected(uid, message, code="invalid_token_id", param=name)
    return None


def overloaded(uid: int, why: str, *, code: str = "queue_full", status: int = 429) -> Rejected:
    """For now: the same request may be accepted later."""
    message = f"the server is overloaded: {why}; try again later"
    return Rejected(uid, message, code=code, status=status, retry_after_s=_RETRY_AFTER_S)


def _too_long(uid: int, length: int, limit: str) -> Rejected:
    message = f"{limit}, but the prompt has {length} tokens and needs room for at least one more; shorten the prompt"
    return Rejected(uid, message, code="context_length_exceeded", param="prompt")
