"""From engine events to text: one choice of an answer, fed by one engine request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from radixserve.engine.messages import FinishReason, TokenEvent, TokenLogprobs
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.text.detokenizer import Detokenizer, StopStringMatcher
from radixserve.server.errors import RequestFailed
from radixserve.server.output.deltas import Content, Delta
from radixserve.server.output.parser import OutputParser


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as the engine takes them (int32, little-endian), their number, and the text if it is known. ``field``
    is where the request has it: what the engine says against a prompt, the client reads about that field."""

    ids: bytes
    num_tokens: int
    text: str | None = None
    field: str = "prompt"


def _ignore(_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class LogprobToken:
    """A generated token with its place in the text: ``offset`` is the number of characters before it."""

    logprobs: TokenLogprobs
    offset: int


@dataclass(eq=False, slots=True)
class Choice:
    """One choice of an answer, filled by one engine request.

    Owns the text that was decoded and not yet taken: a reader that takes it seldom gets more of it at once, so what a
    slow client costs is bounded by its own answer. Stop strings are looked for as tokens arrive, not as they are read.
    With a ``parser`` it comes out as typed deltas, else as plain text. ``prompt_only``: the engine must generate a
    token, but nobody wants it. ``grammar_field``: where the request has what the engine may say against its grammar.
    """

    index: int
    prompt: Prompt
    detokenizer: Detokenizer
    stops: StopStringMatcher | None
    sampling: SamplingParams
    _: KW_ONLY
    parser: OutputParser | None = None
    grammar_field: str = "grammar"
    include_stop: bool = False
    prompt_only: bool = False

    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: RequestFailed | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    on_change: Callable[[Choice], None] = _ignore
    _text: str = ""
    _deltas: list[Delta] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _logprobs: deque[LogprobToken] = field(default_factory=deque)
    _decoded_chars: int = 0
    _shown_chars: int = 0
    _taken_chars: int = 0
    _taken_tokens: int = 0

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def started(self) -> bool:
        return self.num_tokens > 0 or self.done

    # ---- filled by the engine ----

    def on_token(self, token_id: int) -> None:
        """The same as an event with this token alone, which is neither the first nor the last."""
        self.num_tokens += 1
        self._ids.append(token_id)
        self._decode(token_id)
        self.on_change(self)

    def on_tokens(self, event: TokenEvent) -> None:
        """A stop string may be found here, and then ``done`` is true before the engine knows."""
        self._feed(event)
        self.on_change(self)

    def on_failed(self, error: RequestFailed) -> None:
        if error.param == "prompt":
            error.param = self.prompt.field
        elif error.param == "grammar":
            error.param = self.grammar_field
            error.message = f"{self.grammar_field}: {error.message}"
        self.error = error
        self.on_change(self)

    def _feed(self, event: TokenEvent) -> None:
        self.cached_tokens = event.cached_tokens or self.cached_tokens
        if event.prompt_logprobs:
            self.prompt_logprobs += event.prompt_logprobs
        if self.prompt_only:
            self.finish_reason = "length" if event.finish else None
            return
        for position, token in enumerate(event.token_ids):
            self.num_tokens += 1
            self._ids.append(token)
            if event.finish is FinishReason.STOP and position == len(event.token_ids) - 1 and not self.include_stop:
                break  # The token that ends the text is no part of it.
            if event.logprobs is not None:
                self._logprobs.append(LogprobToken(event.logprobs[position], self._decoded_chars))
            if self._decode(token):
                return
        if event.finish is not None:
            self._finish(event)

    def _decode(self, token_id: int) -> bool:
        """Add a token's text; true if that completed a stop string."""
        if self.parser is None:
            return self._append(self.detokenizer.feed(token_id))
        was_reasoning = self.parser.in_reasoning
        stopped = self._append(self.detokenizer.feed(token_id))
        self.num_reasoning_tokens += was_reasoning or self.parser.in_reasoning
        return stopped

    def _show(self, text: str) -> None:
        self._shown_chars += len(text)
        if self.parser is None:
            self._text += text
        else:
            self._deltas += self.parser.feed(text)

    def _append(self, text: str) -> bool:
        """Add decoded text; true if that completed a stop string."""
        self._decoded_chars += len(text)
        if self.stops is None or self.num_tokens <= self.sampling.min_tokens:
            self._show(text)
            return False
        self._show(self.stops.feed(text))
        if self.stops.matched is None:
            return False
        self._stop_at_string(self.stops.matched)
        return True

    def _finish(self, event: TokenEvent) -> None:
        if self._append(self.detokenizer.finish()):
            return
        if self.stops is not None:
            self._show(self.stops.finish())
        self._end("stop" if event.finish is FinishReason.STOP else "length", event.stop_token_id)

    def _stop_at_string(self, matched: str) -> None:
        while self._logprobs and self._logprobs[-1].offset >= self._shown_chars:
            self._logprobs.pop()
        self._end("stop", matched)

    def _end(self, finish_reason: str, stop_reason: str | int | None) -> None:
        if self.parser is not None:
            self._deltas += self.parser.finish(cut=finish_reason == "length")
            if self.parser.num_calls and finish_reason == "stop":
                finish_reason = "tool_calls"
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    # ---- emptied by whoever writes the answer ----

    def has_news(self, interval: int) -> bool:
        """Whether there is text, or the end, to be written; but not every token if ``interval`` is above 1."""
        if self.done:
            return True
        if self.num_tokens - self._taken_tokens < interval and self._taken_tokens:
            return False
        return bool(self._text or self._deltas)

    @property
    def is_parsed(self) -> bool:
        """Whether what comes is more than ``take_text`` can tell."""
        return self.parser is not None

    def take_text(self) -> str:
        """Only without a parser."""
        text, self._text = self._text, ""
        self._taken_chars = self._shown_chars
        self._taken_tokens = self.num_tokens
        return text

    def take_deltas(self) -> list[Delta]:
        """What was said since the last call, with a parser or without; see ``server/output/deltas.py``."""
        text = self.take_text()
        deltas, self._deltas = self._deltas, []
        return [Content(text)] if text else deltas

    def take_ids(self) -> list[int]:
        ids, self._ids = self._ids, []
        return ids

    def take_logprobs(self) -> list[LogprobToken]:
        """Logprobs of the tokens whose text was taken; at the end all that are left."""
        ready = []
        while self._logprobs and (self.done or self._logprobs[0].offset < self._taken_chars):
            ready.append(self._logprobs.popleft())
        return ready
