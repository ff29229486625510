"""How answers are written: as one JSON object or an event stream, made of choices or of blocks, as an API has it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from radixserve.server.choice import Choice, LogprobToken
from radixserve.server.errors import RequestFailed, error_body
from radixserve.server.output.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from radixserve.server.protocol.generation_fields import GenerationRequest
from radixserve.server.protocol.logprobs import Vocabulary, prompt_logprobs

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
# Takes the place of the text in a template; a control character cannot come from anywhere else in a frame.
_MARK = "\x01text\x01"
Kind = type[Content] | type[Reasoning] | type[CallStart]


def named_event(event: dict[str, Any]) -> bytes:
    """A frame whose event has the name that ``type`` says."""
    return event_frame(event["type"], event)


def event_frame(name: str, content: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))


class Answer(ABC):
    """Writes the choices of one request as one JSON object, or as the frames of an event stream: for each choice one
    opening, then text as it comes, then one ending; ``tail`` or ``failure`` is the last of all.

    ``id_prefix`` stands before the request's id in that of the answer. ``keep_alive`` is sent now and then on a stream
    that is silent.
    """

    id_prefix: str
    keep_alive = b": keep-alive\n\n"

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> bytes: ...

    @abstractmethod
    def open_frame(self, choice: Choice) -> bytes: ...

    @abstractmethod
    def text_frames(self, choice: Choice) -> bytes:
        """The text (and what belongs to it) that came since the last call; nothing if none came."""

    @abstractmethod
    def end_frame(self, choice: Choice) -> bytes: ...

    @abstractmethod
    def tail(self, choices: Sequence[Choice]) -> bytes:
        """What ends a stream in which every choice has ended."""

    @abstractmethod
    def failure(self, error: RequestFailed) -> bytes:
        """What ends a stream that fails after its headers were sent."""


# ---- answers of choices ----


class ChoiceAnswer(Answer):
    """As chat completions and completions have it.

    A plain frame is a template of the request with the JSON-escaped text put in, nothing else is encoded per token.
    """

    whole_object: str
    chunk_object: str

    def __init__(self, request_id: str, model: str, request: GenerationRequest, vocabulary: Vocabulary):
        options = request.stream_options
        self._id = self.id_prefix + request_id
        self._model = model
        self._created = int(time.time())
        self._request = request
        self._vocabulary = vocabulary
        self._wants_usage = bool(options.include_usage)
        self._usage_in_chunks = self._wants_usage and bool(options.continuous_usage_stats)
        self._wants_ids = request.return_token_ids
        self._plain = not (request.num_logprobs is not None or self._wants_ids or self._usage_in_chunks)
        self._templates: dict[tuple[int, type[Delta]], list[bytes]] = {}

    # ---- shapes, by API ----

    @abstractmethod
    def whole_choice(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The choice in its first chunk, before any generated text, or None if there is no such chunk."""

    @abstractmethod
    def piece(self, index: int, delta: Delta | None) -> dict[str, Any]:
        """The choice in a chunk with ``delta``; None: with nothing new."""

    @abstractmethod
    def shape_logprobs(self, choice: Choice, tokens: Sequence[LogprobToken]) -> dict[str, Any] | None:
        """Of ``tokens``, where logprobs were asked for."""

    def told(self, choice: Choice) -> list[Delta]:
        """What is new and not to be kept back."""
        return choice.take_deltas()

    def answer_fields(self, choice: Choice) -> dict[str, Any]:
        """What stands beside ``choices`` in the whole answer, or in a choice's first chunk."""
        return {}

    # ---- one JSON object ----

    def whole(self, choices: Sequence[Choice]) -> bytes:
        answer = self._envelope(self.whole_object, [self.whole_choice(choice) for choice in choices])
        return _encode(answer | {"usage": usage(choices)} | self.answer_fields(choices[0]))

    # ---- a stream ----

    def open_frame(self, choice: Choice) -> bytes:
        opening = self.opening(choice)
        return b"" if opening is None else self._frame(opening, choice, self.answer_fields(choice))

    def text_frames(self, choice: Choice) -> bytes:
        """A frame for each delta; what is told of tokens stands in the first."""
        if self._plain and not choice.is_parsed:  # the short way that nearly every token takes
            text = choice.take_text()
            return self._plain_frame(choice.index, Content, text) if text else b""
        deltas = self.told(choice)
        if self._plain:
            return b"".join([self._delta_frame(choice, delta) for delta in deltas])
        pieces = [self.piece(choice.index, delta) for delta in deltas or [Content("")]]
        has_tokens = self.add_tokens(pieces[0], choice)
        return b"".join([self._frame(piece, choice, {}) for piece in pieces]) if deltas or has_tokens else b""

    def _delta_frame(self, choice: Choice, delta: Delta) -> bytes:
        if isinstance(delta, Content | Reasoning):
            return self._plain_frame(choice.index, type(delta), delta.text)
        return self._frame(self.piece(choice.index, delta), choice, {})

    def add_tokens(self, piece: dict[str, Any], choice: Choice) -> bool:
        """Logprobs and ids of new tokens, as far as they were asked for; false if there are none."""
        tokens, ids = choice.take_logprobs(), choice.take_ids()
        if self._request.num_logprobs is not None:
            piece["logprobs"] = self.shape_logprobs(choice, tokens)
        if self._wants_ids:
            piece["token_ids"] = ids
        return bool(tokens or (ids and self._wants_ids))

    def end_frame(self, choice: Choice) -> bytes:
        return self._frame(self.piece(choice.index, None) | self.finish_fields(choice), choice, {})

    def tail(self, choices: Sequence[Choice]) -> bytes:
        if not self._wants_usage:
            return DONE
        return _event(self._envelope(self.chunk_object, []) | {"usage": usage(choices)}) + DONE

    def failure(self, error: RequestFailed) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def _plain_frame(self, index: int, kind: type[Content | Reasoning], text: str) -> bytes:
        template = self._templates.get((index, kind))
        if template is None:
            chunk = self._chunk(self.piece(index, kind(_MARK)))
            template = self._templates[index, kind] = _event(chunk).split(_encode(_MARK))
        return _encode(text).join(template)

    def _frame(self, choice_chunk: dict[str, Any], choice: Choice, extras: dict[str, Any]) -> bytes:
        chunk = self._chunk(choice_chunk) | extras
        if self._usage_in_chunks:
            chunk["usage"] = usage([choice])
        return _event(chunk)

    def _chunk(self, choice_chunk: dict[str, Any]) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_object, [choice_chunk])
        return chunk | {"usage": None} if self._wants_usage else chunk

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    # ---- extensions ----

    def finish_fields(self, choice: Choice) -> dict[str, Any]:
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def prompt_fields(self, choice: Choice) -> dict[str, Any]:
        """The prompt's ids and logprobs, where they were asked for."""
        fields: dict[str, Any] = {}
        if self._wants_ids:
            fields["prompt_token_ids"] = prompt_ids(choice)
        if self._request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self._vocabulary)
        return fields


def prompt_ids(choice: Choice) -> list[int]:
    ids: list[int] = np.frombuffer(choice.prompt.ids, np.int32).tolist()
    return ids


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """A prompt counts once, however many choices it has; what they found cached is what was there before them."""
    by_prompt: dict[int, list[Choice]] = {}
    for choice in choices:
        by_prompt.setdefault(id(choice.prompt), []).append(choice)
    prompt_tokens = sum(same[0].prompt.num_tokens for same in by_prompt.values())
    cached_tokens = sum(min(choice.cached_tokens for choice in same) for same in by_prompt.values())
    completion_tokens = sum(choice.num_tokens for choice in choices)
    told = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if any(choice.is_parsed for choice in choices):
        reasoning_tokens = sum(choice.num_reasoning_tokens for choice in choices)
        told["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return told


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


# ---- answers of blocks ----


@dataclass(slots=True)
class Block:
    """``pieces``: of its text or, of a call, of its arguments. ``call`` says what is called. ``cut``: it is the last,
    and the limit of tokens, or a failure, ended it."""

    index: int
    kind: Kind
    call: CallStart | None = None
    pieces: list[str] = field(default_factory=list)
    cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class BlockAnswer(Answer):
    """Cuts the deltas of its only choice into blocks, and keeps them for the end. Each API frames them in its way."""

    _blocks: list[Block] = field(default_factory=list, init=False)

    # ---- shapes, by API ----

    @abstractmethod
    def start(self, block: Block) -> bytes: ...

    @abstractmethod
    def more(self, block: Block, text: str) -> bytes: ...

    @abstractmethod
    def stop(self, block: Block) -> bytes: ...

    @abstractmethod
    def ending(self, choice: Choice) -> bytes: ...

    @abstractmethod
    def answer(self, choice: Choice) -> dict[str, Any]:
        """The whole answer, of an ended choice."""

    # ---- what is written ----

    def whole(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        self.text_frames(choice)
        self.end_frame(choice)
        return msgspec.json.encode(self.answer(choice))

    def text_frames(self, choice: Choice) -> bytes:
        return b"".join([self._delta_frames(delta) for delta in choice.take_deltas()])

    def end_frame(self, choice: Choice) -> bytes:
        if self._blocks:
            self._blocks[-1].cut = choice.finish_reason == "length"
        return self._stop_last() + self.ending(choice)

    def tail(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def begin(self, kind: Kind, call: CallStart | None = None) -> bytes:
        """Another block. They come one after the other, so the last one ends here."""
        frames = self._stop_last()
        self._blocks.append(Block(len(self._blocks), kind, call))
        return frames + self.start(self._blocks[-1])

    def _stop_last(self) -> bytes:
        return self.stop(self._blocks[-1]) if self._blocks else b""

    def _delta_frames(self, delta: Delta) -> bytes:
        if isinstance(delta, CallStart):
            return self.begin(CallStart, delta)
        kind = CallStart if isinstance(delta, CallArguments) else type(delta)
        goes_on = self._blocks and self._blocks[-1].kind is kind
        frames = b"" if goes_on else self.begin(kind)
        block = self._blocks[-1]
        block.pieces.append(delta.text)
        return frames + self.more(block, delta.text)
