"""Token ids to text in pieces: no character is split, no space lost, and stop strings are cut out before anybody sees
them. Cost per token does not grow with the text."""

import codecs
from collections.abc import Callable, Collection, Set
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Turns one stream of ids into text; the pieces joined are the text of all ids."""

    def feed(self, token_id: int) -> str:
        """The text that is certain once this id has come; may be empty."""

    def finish(self) -> str:
        """What was held back: an incomplete character, as U+FFFD. Call once, after the last id."""


class IncrementalDetokenizer:
    """For tokenizers whose tokens are bytes: feeds them to an incremental UTF-8 decoder, which holds back the bytes of
    an incomplete character.

    ``skipped``: ids that give no text. ``leading_spaces``: as many are removed from the beginning of the whole text,
    where SentencePiece put one before the first word. Undecodable bytes become U+FFFD. ``pieces``: the text of ids that
    are whole characters, as nearly all are; it is filled here, and shared by all streams with the same ``skipped``.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], skipped: Set[int], pieces: dict[int, str], leading_spaces: int = 0
    ):
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._pieces = pieces
        self._leading_spaces = leading_spaces
        self._decoder = _Utf8Decoder("replace")
        self._between_chars = not leading_spaces  # and at no place where spaces are removed

    def feed(self, token_id: int) -> str:
        if self._between_chars and (piece := self._pieces.get(token_id)) is not None:
            return piece
        text = self._decode(b"" if token_id in self._skipped else self._token_bytes(token_id), final=False)
        held, _ = self._decoder.getstate()
        was_between_chars, self._between_chars = self._between_chars, not held and not self._leading_spaces
        if was_between_chars and self._between_chars:
            self._pieces[token_id] = text
        return text

    def finish(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        text = self._decoder.decode(data, final)
        while self._leading_spaces and text:
            if text[0] != " ":
                self._leading_spaces = 0
                break
            text = text[1:]
            self._leading_spaces -= 1
        return text


class DecodeStreamDetokenizer:
    """For decoders of other kinds (WordPiece and the like): the library's own stream, and at the end a full decode for
    what the stream still holds."""

    def __init__(self, backend: Backend, skip_special_tokens: bool):
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._num_sent = 0

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._stream.step(self._backend, token_id) or ""
        self._num_sent += len(text)
        return text

    def finish(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=self._skip_special_tokens)[self._num_sent :]


class StopStringMatcher:
    """Passes text on until a stop string is complete, and never lets the beginning of one out too early.

    The stop string that is complete first ends the text; if several end at the same character, the longest. So the cut
    does not depend on how the text is divided into pieces. Knuth-Morris-Pratt: constant work per character and stop.
    """

    def __init__(self, stops: Collection[str], *, include_stop_str_in_output: bool = False):
        assert "" not in stops, "an empty stop string would match everywhere"
        self.matched: str | None = None
        self._patterns = [_Pattern(stop) for stop in stops]
        self._first_chars = {stop[0] for stop in stops}
        self._include = include_stop_str_in_output
        self._held = ""

    def feed(self, text: str) -> str:
        """The part of all text so far that may be shown now and was not shown before; "" once a stop has matched."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        shown, num_held = self._held + text, len(self._held)
        for position, char in enumerate(text, start=num_held + 1):
            complete = [pattern.text for pattern in self._patterns if pattern.advance(char)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return shown[: position if self._include else position - len(self.matched)]
        num_held = max(pattern.num_matched for pattern in self._patterns)
        self._held = shown[len(shown) - num_held :]
        return shown[: len(shown) - num_held]

    def finish(self) -> str:
        """The text still held back when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string and how many of its characters the text ends with."""

    def __init__(self, text: str):
        self.text = text
        self.num_matched = 0
        self._fallback = [0] * len(text)  # Longest proper prefix that is also a suffix of text[:i + 1].
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def advance(self, char: str) -> bool:
        """Take the next character; true when the stop string is complete."""
        matched = self.num_matched
        while matched and self.text[matched] != char:
            matched = self._fallback[matched - 1]
        self.num_matched = matched + (self.text[matched] == char)
        return self.num_matched == len(self.text)
