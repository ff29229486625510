"""Reading generated text character by character, in coroutines: how it comes in pieces cannot make a difference.

A coroutine asks for characters with ``yield from reader.next()`` and gets ``END`` for ever once the text is over. So
parsers are written as if the whole text were there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from radixserve.engine.text.detokenizer import StopStringMatcher

Result = TypeVar("Result")
Reading = Generator[None, str, Result]

END = ""
SPACE = " \t\r\n"


class Malformed(Exception):
    """The text is not what it seemed to begin; never leaves the parser."""


class Reader:
    """Owns the characters that were looked at and given back, and those read since ``mark``."""

    def __init__(self) -> None:
        self._given_back = ""
        self._ended = False
        self._marked: list[str] = []

    def next(self) -> Reading[str]:
        if self._given_back:
            char, self._given_back = self._given_back[0], self._given_back[1:]
        elif self._ended:
            return END
        else:
            char = yield
            if char == END:
                self._ended = True
                return END
        self._marked.append(char)
        return char

    def give_back(self, chars: str) -> None:
        """The last characters, which ``next`` is to return again."""
        if chars:
            self._given_back = chars + self._given_back
            del self._marked[-len(chars) :]

    def mark(self) -> None:
        self._marked.clear()

    def since_mark(self) -> str:
        return "".join(self._marked)

    # ---- pieces that all parsers are made of ----

    def after_space(self) -> Reading[str]:
        """The next character that is no white space."""
        char = yield from self.next()
        while char and char in SPACE:
            char = yield from self.next()
        return char

    def until(
        self, emit: Callable[[str], None], *markers: str, at_end: Callable[[str], None] | None = None
    ) -> Reading[str | None]:
        """Pass text to ``emit`` up to the first of ``markers`` and return that, or None at the end of the text.

        ``at_end``: gets the beginning of a marker with which the text ends, instead of ``emit``.
        """
        matcher = StopStringMatcher(markers)
        while matcher.matched is None:
            char = yield from self.next()
            if char == END:
                if held := matcher.finish():
                    (at_end or emit)(held)
                return None
            if shown := matcher.feed(char):
                emit(shown)
        return matcher.matched

    def text_until(self, *markers: str) -> Reading[tuple[str, str]]:
        """The text up to the first of ``markers``, and that. Raises ``Malformed`` if none comes."""
        text: list[str] = []
        found = yield from self.until(text.append, *markers)
        if found is None:
            raise Malformed
        return "".join(text), found

    def word(self) -> Reading[str]:
        """The name that comes next, after white space; empty if none does."""
        char = yield from self.after_space()
        name: list[str] = []
        while char.isalnum() or (char and char in "_.:-"):
            name.append(char)
            char = yield from self.next()
        self.give_back(char)
        return "".join(name)

    def try_literal(self, text: str) -> Reading[bool]:
        """Whether ``text`` comes next; if not, nothing was read, but what is left at the end of all text."""
        for position, expected in enumerate(text):
            char = yield from self.next()
            if char == END:
                return False
            if char != expected:
                self.give_back(text[:position] + char)
                return False
        return True

    def string(self, quote: str, sink: Callable[[str], None]) -> Reading[None]:
        """The rest of a string whose opening ``quote`` was read, as written, with the closing one."""
        escaped = False
        while True:
            char = yield from self.next()
            if char == END:
                raise Malformed
            sink(char)
            if char == quote and not escaped:
                return
            escaped = char == "\\" and not escaped

    def json_value(self, first: str, sink: Callable[[str], None]) -> Reading[None]:
        """A JSON value that begins with ``first``, as written. What is no JSON may pass; its end may not be missing."""
        if first == '"':
            sink(first)
            yield from self.string(first, sink)
        elif first and first in "{[":
            yield from self.nested(first, sink)
        else:
            while first and first not in ",}]" + SPACE:
                sink(first)
                first = yield from self.next()
            self.give_back(first)

    def nested(self, char: str, sink: Callable[[str], None], quotes: str = '"') -> Reading[None]:
        """What begins with the bracket ``char``, up to the one that closes it, as written."""
        depth = 0
        while True:
            if char == END:
                raise Malformed
            sink(char)
            if char in quotes:
                yield from self.string(char, sink)
            depth += (char in "([{") - (char in ")]}")
            if not depth:
                return
            char = yield from self.next()
