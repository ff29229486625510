"""What a choice says, piece by piece: the one stream that every route frames in its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins, the ``index``-th of the choice; calls come one after the other."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """More of a call's arguments, which all together are JSON, if the model has written it well."""

    index: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


class Deltas:
    """Collects deltas, joining neighbours of a kind: the last one grows until it is taken. Owns the white space that
    may turn out to be at an edge, where nobody wants it: between reasoning, content and calls."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._ready: list[Delta] = []
        self._space = ""  # white space of the current part that is not passed on yet
        self._at_edge = False  # nothing of the current part was passed on, and something came before it

    def content(self, text: str) -> None:
        if text := self._inside(text):
            self._add(Content(text))

    def reasoning(self, text: str) -> None:
        if text := self._inside(text):
            self._add(Reasoning(text))

    def edge(self) -> None:
        """Here one part ends and another begins."""
        self._space, self._at_edge = "", True

    def start_call(self, name: str) -> None:
        self.edge()
        self._ready.append(CallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        self._add(CallArguments(self.num_calls - 1, text))

    def finish(self) -> None:
        """The text is at its end; white space there belongs to content that stands alone."""
        if self._space and not self._at_edge and not self.num_calls:
            self._add(Content(self._space))
        self._space = ""

    def take(self) -> list[Delta]:
        ready, self._ready = self._ready, []
        return ready

    def _inside(self, text: str) -> str:
        """The part of ``text`` that is surely not at an edge, and what was kept before it."""
        text = self._space + text
        if self._at_edge:
            text = text.lstrip()
        inside = text.rstrip()
        self._space = text[len(inside) :]
        if inside:
            self._at_edge = False
        return inside

    def _add(self, delta: Content | Reasoning | CallArguments) -> None:
        """Between arguments of two calls there is always the start of the second."""
        last = self._ready[-1] if self._ready else None
        if isinstance(last, type(delta)):
            last.text += delta.text
        else:
            self._ready.append(delta)
