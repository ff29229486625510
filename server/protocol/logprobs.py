"""Log-probabilities in the shapes of the OpenAI API. Values are finite: JSON has no infinity."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from radixserve.engine.messages import TokenLogprobs
from radixserve.server.choice import LogprobToken

# What OpenAI reports for a token that cannot come.
_LOWEST = -9999.0
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Vocabulary(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


def finite(logprob: float) -> float:
    return min(0.0, logprob) if logprob > _LOWEST else _LOWEST  # NaN compares false: also the lowest


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def chat_logprobs(tokens: Sequence[LogprobToken], vocabulary: Vocabulary) -> dict[str, Any]:
    return {"content": [_chat_entry(token.logprobs, vocabulary) for token in tokens], "refusal": None}


def _chat_entry(token: TokenLogprobs, vocabulary: Vocabulary) -> dict[str, Any]:
    top = [_chat_token(token_id, logprob, vocabulary) for token_id, logprob in token.top]
    return _chat_token(token.token_id, token.logprob, vocabulary) | {"top_logprobs": top}


def _chat_token(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    raw = vocabulary.token_bytes(token_id)
    return {"token": _text(raw), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """The four parallel lists of /v1/completions; ``text_offset`` counts characters, the echoed prompt's included."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self.lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        """The first token has no logprob: nothing predicts it."""
        offset, decoder = 0, _Utf8Decoder("replace")
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            self._add(token_id, entry, offset)
            offset += len(decoder.decode(self._vocabulary.token_bytes(token_id)))

    def add(self, tokens: Sequence[LogprobToken], offset: int) -> None:
        for token in tokens:
            self._add(token.logprobs.token_id, token.logprobs, offset + token.offset)

    def _add(self, token_id: int, entry: TokenLogprobs | None, offset: int) -> None:
        logprob = None if entry is None else finite(entry.logprob)
        top = None if entry is None else {self._name(i): finite(logprob) for i, logprob in entry.top}
        for values, value in zip(self.lists.values(), (self._name(token_id), logprob, top, offset), strict=True):
            values.append(value)

    def _name(self, token_id: int) -> str:
        """Tokens that are no whole characters are told apart by their bytes, as OpenAI does."""
        raw = self._vocabulary.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """vLLM's extension: for each prompt token a map from token ids, its own first, to their logprobs and ranks."""
    return [None if entry is None else _by_id(entry, vocabulary) for entry in entries]


def _by_id(entry: TokenLogprobs, vocabulary: Vocabulary) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
    found: dict[str, Any] = {}
    for token_id, logprob, rank in ranked:
        text = _text(vocabulary.token_bytes(token_id))
        found.setdefault(str(token_id), {"logprob": finite(logprob), "rank": rank, "decoded_token": text})
    return found
