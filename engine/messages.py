"""What frontends and the engine say to each other over ZMQ: msgspec structs, one tagged union per direction. No torch.

A frontend's DEALER socket talks to the engine's ROUTER socket; the socket identity tells frontends apart, so a ``uid``
needs to be unique within one frontend only. Every ``Submit`` is answered by exactly one final event: a ``TokenEvent``
with a ``finish`` or a ``Rejected``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from radixserve.engine.observation import EngineView
from radixserve.engine.sampling_params import SamplingParams

TOKEN_BYTES = 4  # of an id in a message


class FinishReason(StrEnum):
    """Why a request ended. STOP: end-of-sequence or a stop id. LENGTH: token or context limit."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# ---- frontend -> engine ----


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a frontend; the engine watches ``pid`` and aborts its requests when it dies."""

    pid: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A validated, tokenized request. ``prompt_ids``: int32 little-endian bytes. ``namespace``: from cache_salt and
    the like; requests of different namespaces share no prefix. Lower ``priority`` runs earlier (policy priority).
    Tenants (API keys) share the engine by their ``weight``."""

    uid: int
    request_id: str
    prompt_ids: bytes
    sampling: SamplingParams
    priority: int = 0
    namespace: str = ""
    tenant: str = ""
    weight: float = 1.0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client of ``uid`` (of this frontend) is gone. No answer is owed unless the request still runs."""

    uid: int


class AbortRequest(msgspec.Struct, frozen=True, tag="abort_request"):
    """POST /abort_request: by user-visible id, whichever frontend has it. ``request_id`` "" means all."""

    request_id: str


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Drop every cached prefix that no running request holds; answered by ``CacheFlushed``."""

    call: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask for an ``EngineStatus`` now."""


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Show this frontend what the engine does, for the next seconds (``observation.LEASE_S``). ``anew``: it has seen
    nothing yet, or lost track."""

    anew: bool = False


ToEngine = Hello | Submit | Abort | AbortRequest | FlushCache | Ping | Watch


# ---- engine -> frontend ----


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of ``token_id``, and of the ``top`` alternatives, best first. ``rank`` is the
    token's place among all tokens of the vocabulary, 1 for the likeliest."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 1


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. ``finish`` is set on its last event, ``error`` only with ``FinishReason.ERROR``.
    ``cached_tokens`` (prompt tokens from the prefix cache) is told with the first token and the end. The event with
    the first token tells how long the request waited for its row, and how long its prompt then took, in seconds."""

    uid: int
    token_ids: list[int]
    finish: FinishReason | None = None
    cached_tokens: int = 0
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    queue_s: float | None = None
    prefill_s: float | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All that one step produced for one frontend. By far most requests got one token and nothing else is to be said:
    ``uids`` and ``tokens`` are parallel lists, cheaper to write and to read than events. No request is in both."""

    events: list[TokenEvent] = []
    uids: list[int] = []
    tokens: list[int] = []

    def each(self) -> Iterator[TokenEvent]:
        """Everything as events, for readers with time."""
        for uid, token in zip(self.uids, self.tokens, strict=True):
            yield TokenEvent(uid, [token])
        yield from self.events


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The request was never admitted. ``status``: the HTTP status that fits."""

    uid: int
    message: str
    code: str | None = None
    param: str | None = None
    status: int = 400
    retry_after_s: float | None = None


class CacheFlushed(msgspec.Struct, frozen=True, tag="cache_flushed"):
    call: int
    num_tokens: int


class Unreadable(msgspec.Struct, frozen=True, tag="unreadable"):
    """A message from this frontend was damaged beyond telling which request it was about."""


@dataclass(slots=True)
class Counters:
    """Since start; tokens where the name says so, else requests or steps. Generated tokens include forced ones, which a
    grammar left no choice about."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    failed: int = 0
    retracted: int = 0


@dataclass(slots=True)
class EngineStats(Counters):
    """Also gauges, and what the cache has counted."""

    running: int = 0
    waiting: int = 0
    kv_total_tokens: int = 0
    kv_free_tokens: int = 0
    kv_evictable_tokens: int = 0
    evicted_tokens: int = 0


class EngineStatus(msgspec.Struct, frozen=True, tag="status"):
    """Heartbeat, at least every second from the engine's own thread, so that silence means it is stuck.
    ``phase``: loading, ready or failed; ``progress`` in 0..1 while loading; ``model``: facts for /v1/models."""

    pid: int
    phase: str
    detail: str = ""
    progress: float = 0.0
    max_model_len: int = 0
    vocab_size: int = 0
    stats: EngineStats = msgspec.field(default_factory=EngineStats)


class Observation(msgspec.Struct, frozen=True, tag="observation"):
    """To those who watch, some times a second."""

    stats: EngineStats
    view: EngineView


ToFrontend = Outputs | Rejected | CacheFlushed | Unreadable | EngineStatus | Observation
