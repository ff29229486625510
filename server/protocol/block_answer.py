"""Answers of APIs that know no choices: one sequence of blocks, each of text, of reasoning, or a call of a tool."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixserve.server.choice import Choice
from radixserve.server.output.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from radixserve.server.protocol.answer import Answer

Kind = type[Content] | type[Reasoning] | type[CallStart]


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


class BlockAnswer(Answer):
    """Cuts the deltas of its only choice into blocks, and keeps them for the end. Each API frames them in its way."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

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
