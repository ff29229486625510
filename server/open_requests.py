"""The requests of a frontend that the engine works on, and who is told what becomes of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from radixserve.engine.messages import Abort, FinishReason, Outputs, Rejected, Submit, ToEngine, TokenEvent
from radixserve.server.choice import Choice
from radixserve.server.errors import RequestFailed
from radixserve.server.metrics import Numbers, RequestMeter, RequestObserver

log = logging.getLogger("radixserve.server")

TOKEN_ID_BYTES = 4  # in ``Submit.prompt_ids``


class _Open(NamedTuple):
    choice: Choice  # after ``on_failed`` or an event with ``finish`` there is no more
    meter: RequestMeter


@dataclass
class OpenRequests:
    """Owns the choices and meters of open requests by uid. Each request leaves once: finished, failed or aborted."""

    send: Callable[[ToEngine], bool]
    numbers: Numbers
    observers: Sequence[Callable[[Submit], RequestObserver]]
    _open: dict[int, _Open] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: Submit, choice: Choice) -> None:
        observers = [observe(request) for observe in self.observers]
        meter = RequestMeter(self.numbers, len(request.prompt_ids) // TOKEN_ID_BYTES, observers)
        self._open[request.uid] = _Open(choice, meter)

    # ---- what the client wants ----

    def abort(self, uid: int) -> None:
        """The caller wants no more events of ``uid``; nothing happens if it has ended."""
        if (call := self._open.pop(uid, None)) is not None:
            call.meter.end("num_aborted_requests")
            self.send(Abort(uid))

    def complete(self, uid: int) -> None:
        """A stop string ended ``uid``, of which the engine knows nothing; nothing happens if it has ended."""
        if (call := self._open.get(uid)) is not None:
            call.meter.end("request_success", FinishReason.STOP.value)
            self.abort(uid)

    # ---- what the engine says ----

    def deliver(self, outputs: Outputs, now: float) -> None:
        """``now``: when they were received, time.monotonic()."""
        self._deliver_tokens(outputs.uids, outputs.tokens, now)
        for event in outputs.events:
            if (call := self._open.get(event.uid)) is None:
                continue
            try:
                self._deliver_event(event, call.choice, call.meter, now)
            except Exception:
                self._give_up(event.uid, call)

    def _deliver_tokens(self, uids: list[int], tokens: list[int], now: float) -> None:
        """The path that nearly every token takes."""
        for uid, token in zip(uids, tokens, strict=True):
            if (call := self._open.get(uid)) is None:
                continue  # aborted meanwhile
            call.meter.on_token(now)
            try:
                call.choice.on_token(token)
            except Exception:
                self._give_up(uid, call)

    def _deliver_event(self, event: TokenEvent, choice: Choice, meter: RequestMeter, now: float) -> None:
        if event.finish is None:
            meter.on_tokens(event, now)
            choice.on_tokens(event)
            return
        del self._open[event.uid]
        match event.finish:
            case FinishReason.ERROR:
                meter.end("num_failed_requests")
                choice.on_failed(
                    RequestFailed(event.error or "generation failed", status=500, code="generation_failed")
                )
            case FinishReason.ABORT:
                meter.end("num_aborted_requests")
                choice.on_failed(RequestFailed("the request was aborted", status=499, code="request_aborted"))
            case FinishReason.STOP | FinishReason.LENGTH:
                meter.on_tokens(event, now)
                meter.end("request_success", event.finish.value)
                choice.on_tokens(event)

    def reject(self, message: Rejected) -> None:
        if (call := self._open.pop(message.uid, None)) is not None:
            call.meter.end("admission_rejections", message.code or "other")
            error = RequestFailed(
                message.message,
                param=message.param,
                code=message.code,
                status=message.status,
                retry_after_s=message.retry_after_s,
            )
            call.choice.on_failed(error)

    # ---- what goes wrong ----

    def _give_up(self, uid: int, call: _Open) -> None:
        """Our fault: what the engine said could not be made an answer. The others of its message must not suffer."""
        log.exception("a request failed between the engine and its client")
        self._fail(uid, call, RequestFailed("internal error", status=500, code="internal_error"))

    def fail_all(self, error: RequestFailed) -> None:
        """End every open request with ``error``."""
        for uid, call in list(self._open.items()):
            self._fail(uid, call, error)

    def lose_all(self, error: RequestFailed) -> None:
        """``fail_all`` where the engine that had them is gone: it must not be told to abort them."""
        lost, self._open = self._open, {}
        for call in lost.values():
            call.meter.end("num_failed_requests")
            call.choice.on_failed(copy(error))

    def _fail(self, uid: int, call: _Open, error: RequestFailed) -> None:
        call.meter.end("num_failed_requests")
        self.abort(uid)
        call.choice.on_failed(copy(error))  # one for each: every task that raised it would add to one traceback
