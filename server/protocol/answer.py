"""How an answer is written, whichever API it belongs to, and the frames of event streams whose events have names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from radixserve.server.choice import Choice
from radixserve.server.errors import RequestFailed


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


def named_event(event: dict[str, Any]) -> bytes:
    """A frame whose event has the name that ``type`` says."""
    return event_frame(event["type"], event)


def event_frame(name: str, content: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))
