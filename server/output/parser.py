"""Takes generated text apart, as it comes, into reasoning, content and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from typing import Any

from radixserve.server.output.calls import CallReader
from radixserve.server.output.deltas import Content, Delta, Deltas, Reasoning
from radixserve.server.output.formats import CallFormat, ReasoningFormat
from radixserve.server.output.reader import END, Malformed, Reader, Reading


class OutputParser:
    """Of one choice. ``thinking``: the prompt ends inside reasoning. ``tools``: parameter schemas by name; calls are
    looked for only if there are some. What is no sound call, or calls something else, is content; but a call that a
    marker began and the limit of tokens cut before its name is dropped.

    ``single_call``: from the second call on nothing is told.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        tools: Mapping[str, Any],
        *,
        thinking: bool = False,
        single_call: bool = False,
    ):
        self.in_reasoning = False
        self._cut = False  # the text is over, and was cut
        self._deltas = Deltas(_short_id if calls is not None and calls.short_ids else _long_id)
        self._reader = Reader()
        self._call_reader = CallReader(self._reader, self._deltas, tools)
        self._thinking = thinking
        self._single_call = single_call
        self._run = self._parse(reasoning, calls if tools else None)
        next(self._run)

    @property
    def num_calls(self) -> int:
        return self._deltas.num_calls

    def feed(self, text: str) -> list[Delta]:
        for char in text:
            self._run.send(char)
        return self._take()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What was held back. The last call. ``cut``: the text did not end by itself."""
        self._cut = cut
        self._run.send(END)
        self._deltas.finish()
        return self._take()

    def _take(self) -> list[Delta]:
        deltas = self._deltas.take()
        if not self._single_call:
            return deltas
        return [d for d in deltas if isinstance(d, Content | Reasoning) or d.index == 0]

    def _parse(self, reasoning: ReasoningFormat | None, calls: CallFormat | None) -> Reading[None]:
        if reasoning is not None:
            yield from self._reasoning(reasoning)
        if calls is not None:
            yield from self._calls(calls)
        yield from self._rest()

    def _rest(self) -> Reading[None]:
        while True:
            char = yield from self._reader.next()
            if char == END:
                yield
            else:
                self._deltas.content(char)

    def _reasoning(self, form: ReasoningFormat) -> Reading[None]:
        self.in_reasoning = self._thinking or form.always  # white space at the beginning counts
        if not (yield from self._begins_with(form.start)) and not self.in_reasoning:
            return
        self.in_reasoning = True
        self._deltas.edge()
        yield from self._reader.until(self._deltas.reasoning, form.end, at_end=self._end_begun)
        self._deltas.edge()
        self.in_reasoning = False

    def _end_begun(self, text: str) -> None:
        """``text`` began the end of the reasoning and is none: more of it, unless it was cut."""
        if not self._cut:
            self._deltas.reasoning(text)

    def _begins_with(self, start: str) -> Reading[bool]:
        """Whether ``start`` comes next, after white space; if not, nothing was read; one that was cut is dropped."""
        self._reader.mark()
        char = yield from self._reader.after_space()
        self._reader.give_back(char)
        if (yield from self._reader.try_literal(start)):
            return True
        begun = self._reader.since_mark()
        if not self._cut or begun.isspace():
            self._reader.give_back(begun)
        return False

    def _calls(self, form: CallFormat) -> Reading[None]:
        if form.bare and (yield from self._begins_with_any(form.bare)):
            yield from self._body(form, "")
        while form.starts:
            start = yield from self._reader.until(self._deltas.content, *form.starts, at_end=self._begun)
            if start is None:
                return
            yield from self._body(form, start)

    def _begun(self, text: str) -> None:
        """``text`` began a call and is none: content, unless it was cut. Some markers begin as a word does, though."""
        if self._cut and not text.strip().isalpha():
            self._deltas.edge()
        else:
            self._deltas.content(text)

    def _begins_with_any(self, chars: str) -> Reading[bool]:
        self._reader.mark()
        char = yield from self._reader.after_space()
        self._reader.give_back(self._reader.since_mark())
        return bool(char) and char in chars

    def _body(self, form: CallFormat, start: str) -> Reading[None]:
        """Calls behind ``start``; it and what follows is content if it is none, except that the character that does not
        fit may begin a marker."""
        self._reader.mark()
        num_calls = self._deltas.num_calls
        read = self._call_reader
        bodies = {"json": read.json_body, "xml": read.xml_body, "pythonic": read.pythonic_body}
        try:
            yield from bodies.get(form.body, read.mistral_body)()
        except Malformed:
            if not read.in_call:  # else all of it was told as arguments
                if not self._cut:
                    self._reader.give_back(self._reader.since_mark()[-1:])
                text, follows_call = self._reader.since_mark(), self._deltas.num_calls > num_calls
                tell = self._begun if start or follows_call else self._deltas.content
                tell(text if follows_call else start + text)
            read.in_call = False
            return
        self._deltas.edge()
        yield from self._end(form.ends)

    def _end(self, ends: tuple[str, ...]) -> Reading[None]:
        """Pass over what closes the calls, if it is there."""
        for end in ends:
            if (yield from self._begins_with(end)):
                return


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """As Mistral's templates demand it."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
