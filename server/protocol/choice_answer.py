"""Answers that consist of choices: their identity and usage, and stream frames made from a template."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from radixserve.server.choice import Choice, LogprobToken
from radixserve.server.errors import RequestFailed, error_body
from radixserve.server.output.deltas import Content, Delta, Reasoning
from radixserve.server.protocol.answer import Answer
from radixserve.server.protocol.generation_fields import GenerationRequest
from radixserve.server.protocol.logprobs import Vocabulary, prompt_logprobs

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
# Takes the place of the text in a template; a control character cannot come from anywhere else in a frame.
_MARK = "\x01text\x01"


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

    # ---- shapes, by kind ----

    @abstractmethod
    def whole_choice(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The choice in its first chunk, before any generated text, or None if there is no such chunk."""

    @abstractmethod
    def piece(self, index: int, text: str) -> dict[str, Any]:
        """The choice in a chunk with text."""

    def delta_piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice in a chunk with ``delta``, where choices are parsed."""
        raise NotImplementedError

    def tells(self, delta: Delta) -> bool:
        return True

    @abstractmethod
    def ending(self, choice: Choice) -> dict[str, Any]:
        """The choice in its last chunk."""

    @abstractmethod
    def shape_logprobs(self, choice: Choice, tokens: Sequence[LogprobToken]) -> dict[str, Any] | None:
        """Of ``tokens``, where logprobs were asked for."""

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
        if choice.is_parsed:
            return self._delta_frames(choice)
        text = choice.take_text()
        if self._plain:
            return self._plain_frame(choice.index, Content, text) if text else b""
        piece = self.piece(choice.index, text)
        has_tokens = self.add_tokens(piece, choice)
        return self._frame(piece, choice, {}) if text or has_tokens else b""

    def _delta_frames(self, choice: Choice) -> bytes:
        """A frame for each delta; what is told of tokens stands in the first."""
        deltas = [delta for delta in choice.take_deltas() if self.tells(delta)]
        if self._plain:
            return b"".join([self._delta_frame(choice, delta) for delta in deltas])
        pieces = [self.delta_piece(choice.index, delta) for delta in deltas]
        first = pieces[0] if pieces else self.piece(choice.index, "")
        if self.add_tokens(first, choice) and not pieces:
            pieces.append(first)
        return b"".join([self._frame(piece, choice, {}) for piece in pieces])

    def _delta_frame(self, choice: Choice, delta: Delta) -> bytes:
        if isinstance(delta, Content | Reasoning):
            return self._plain_frame(choice.index, type(delta), delta.text)
        return self._frame(self.delta_piece(choice.index, delta), choice, {})

    def add_tokens(self, piece: dict[str, Any], choice: Choice) -> bool:
        """Logprobs and ids of new tokens, as far as they were asked for; false if there are none."""
        tokens, ids = choice.take_logprobs(), choice.take_ids()
        if self._request.num_logprobs is not None:
            piece["logprobs"] = self.shape_logprobs(choice, tokens)
        if self._wants_ids:
            piece["token_ids"] = ids
        return bool(tokens or (ids and self._wants_ids))

    def end_frame(self, choice: Choice) -> bytes:
        return self._frame(self.ending(choice), choice, {})

    def tail(self, choices: Sequence[Choice]) -> bytes:
        if not self._wants_usage:
            return DONE
        return _event(self._envelope(self.chunk_object, []) | {"usage": usage(choices)}) + DONE

    def failure(self, error: RequestFailed) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def _plain_frame(self, index: int, kind: type[Content | Reasoning], text: str) -> bytes:
        template = self._templates.get((index, kind))
        if template is None:
            piece = self.piece(index, _MARK) if kind is Content else self.delta_piece(index, kind(_MARK))
            template = self._templates[index, kind] = _event(self._chunk(piece)).split(_encode(_MARK))
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
    prompts = {id(choice.prompt): choice.prompt.num_tokens for choice in choices}
    cached: dict[int, int] = {}
    for choice in choices:
        key = id(choice.prompt)
        cached[key] = min(cached.get(key, choice.cached_tokens), choice.cached_tokens)
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(choice.num_tokens for choice in choices)
    told = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }
    if any(choice.is_parsed for choice in choices):
        reasoning_tokens = sum(choice.num_reasoning_tokens for choice in choices)
        told["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return told


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
