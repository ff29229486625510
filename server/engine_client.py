"""The frontend's end of the ZMQ line to the engine: the open requests, the engine's health, and its death."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq
from opentelemetry.trace import Tracer

from radixserve.engine.messages import (
    Abort,
    AbortRequest,
    CacheFlushed,
    EngineStatus,
    FinishReason,
    FlushCache,
    Hello,
    Observation,
    Outputs,
    Ping,
    Rejected,
    Submit,
    ToEngine,
    ToFrontend,
    TokenEvent,
    Unreadable,
    Watch,
)
from radixserve.server.engine_process import EngineProcess
from radixserve.server.errors import RequestFailed
from radixserve.server.metrics import Numbers, RequestMeter
from radixserve.server.tracing import RequestSpan

log = logging.getLogger("radixserve.server")

TICK_S = 1.0
SEARCH_TICK_S = 0.1  # while no engine is known
# A turn of the event loop hands out messages until these are so many: what is written in one turn leaves together, and
# a step of many requests shall not wait for the next, but a turn for each message of a few tokens would cost more.
TOKENS_A_TURN = 64
# A silent engine is greeted again after this time: it may be a new one that has not heard of us.
GREETING_S = 2.0
TOKEN_ID_BYTES = 4  # in ``Submit.prompt_ids``
# The reason itself may name files of the server, which concern no client.
FAILED = "the model could not be loaded; the server's log says why"


class Sink(Protocol):
    """Takes what comes for one engine request. After ``on_failed`` or an event with ``finish`` there is no more."""

    def on_token(self, token_id: int) -> None: ...

    def on_tokens(self, event: TokenEvent) -> None: ...

    def on_failed(self, error: RequestFailed) -> None: ...


@dataclass(frozen=True, slots=True)
class Health:
    """``status``: ok, loading, stuck, dead or failed. ``progress`` in 0..1 while loading."""

    status: str
    reason: str = ""
    progress: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, slots=True)
class _Open:
    sink: Sink
    meter: RequestMeter


class EngineClient:
    """Owns the DEALER socket, the open requests by uid, and what is known of the engine.

    A plain socket with its file descriptor in the event loop, not zmq.asyncio: one message carries a whole step, which
    is handed to its sinks right in the reader callback, without a future or a task switch in between. Lives on
    one event loop: ``start`` and ``close`` are called there, and so is everything else.
    """

    def __init__(
        self,
        address: str,
        health_timeout_s: float,
        watchdog_s: float,
        numbers: Numbers,
        tracer: Tracer | None = None,
    ):
        self._address = address
        self._health_timeout_s = health_timeout_s
        self._watchdog_s = watchdog_s
        self._tracer = tracer
        self._uids = itertools.count(1)
        self._numbers = numbers
        self._open: dict[int, _Open] = {}
        self._flushes: dict[int, asyncio.Future[int]] = {}
        self._status_waiters: list[asyncio.Future[None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToFrontend)
        self._context = zmq.Context()
        self._process: EngineProcess | None = None
        self._looking = False
        self._died = ""  # why, until the next engine is heard of
        self._last_heard = self._last_greeting = -math.inf
        self.status: EngineStatus | None = None
        self.on_observation: Callable[[Observation], None] | None = None

    # ---- life ----

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect()
        self._tick()

    def close(self) -> None:
        self._ticker.cancel()
        self._forget_process()
        self._disconnect()
        self._context.term()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Nothing is queued while no engine listens: a send fails at once, and no stale request reaches the next engine.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        # Tokens must never be dropped here; open requests and their lengths bound what can queue up.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(self._address)
        self._loop.add_reader(self._socket.fileno(), self._look_soon)
        self._last_greeting = -math.inf

    def _disconnect(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(SEARCH_TICK_S if self.status is None else TICK_S, self._tick)
        now = time.monotonic()
        if now - max(self._last_heard, self._last_greeting) > GREETING_S and self._send(Hello(os.getpid())):
            self._last_greeting = now
        if self._process is not None and self._process.has_vanished:
            self._on_death()
        if self._process is not None and self.status is not None and self.status.phase == "ready":
            self._process.on_silence(TICK_S, self._watchdog_s)
        self._look_soon()  # ZMQ's descriptor is edge-triggered; this bounds what a lost edge could cost.

    # ---- requests ----

    def new_uid(self) -> int:
        return next(self._uids)

    def submit(self, request: Submit, sink: Sink) -> None:
        """Send a request; the sink gets exactly one final event unless ``abort(request.uid)`` comes first.

        Raises ``RequestFailed`` when no engine is there to take it.
        """
        health = self.health()
        if not health.ok:
            raise RequestFailed(f"the engine is not ready: {health.reason}", code="engine_" + health.status)
        if not self._send(request):
            raise RequestFailed("the engine does not take requests", code="engine_unreachable", retry_after_s=1)
        span = None if self._tracer is None else RequestSpan(self._tracer, request)
        meter = RequestMeter(self._numbers, len(request.prompt_ids) // TOKEN_ID_BYTES, span)
        self._open[request.uid] = _Open(sink, meter)

    def abort(self, uid: int) -> None:
        """The caller wants no more events of ``uid``; nothing happens if it has ended."""
        if (call := self._open.pop(uid, None)) is not None:
            call.meter.aborted()
            self._send(Abort(uid))

    def complete(self, uid: int) -> None:
        """A stop string ended ``uid``, of which the engine knows nothing; nothing happens if it has ended."""
        if (call := self._open.get(uid)) is not None:
            call.meter.succeeded(FinishReason.STOP.value)
            self.abort(uid)

    def abort_by_id(self, request_id: str) -> None:
        """Whichever frontend has it; "" means all. Their clients get an error."""
        self._send(AbortRequest(request_id))

    def fail_all(self, error: RequestFailed) -> None:
        """End every open request with ``error``."""
        for uid, call in list(self._open.items()):
            call.meter.failed()
            self.abort(uid)
            call.sink.on_failed(error)

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def flush_cache(self, timeout_s: float = 10.0) -> int:
        """Drop all cached prefixes that nobody uses; returns the number of tokens. Raises ``RequestFailed``."""
        call = next(self._uids)
        answer = self._flushes[call] = self._loop.create_future()
        try:
            if not self._send(FlushCache(call)):
                raise RequestFailed("the engine is not reachable", code="engine_unreachable")
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise RequestFailed("the engine does not answer", code="engine_stuck") from None
        finally:
            del self._flushes[call]

    # ---- health ----

    def health(self) -> Health:
        if self._died:
            return Health("dead", self._died)
        if self.status is None:
            return Health("loading", "the engine is starting")
        silence_s = self._silence_s()
        if silence_s > self._health_timeout_s:
            return Health("stuck", f"the engine has been silent for {silence_s:.0f} s")
        if self.status.phase == "loading":
            return Health("loading", self.status.detail or "the model is loading", self.status.progress)
        if self.status.phase != "ready":
            return Health("failed", FAILED)
        return Health("ok")

    async def fresh_status(self, timeout_s: float = 1.0) -> EngineStatus | None:
        """The engine's status as of now, or the last one known if it does not answer in time."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        if self._send(Ping()):
            self._status_waiters.append(waiter)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter, timeout_s)
        return self.status

    def watch(self, *, anew: bool) -> None:
        """Ask for observations of the next seconds, if the engine can be asked."""
        self._send(Watch(anew))

    def _silence_s(self) -> float:
        return time.monotonic() - self._last_heard

    # ---- the wire ----

    def _send(self, message: ToEngine) -> bool:
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # A send can swallow the edge that announces a received message.
        self._look_soon()
        return True

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Hand out what is there, but not all of it in one turn."""
        self._looking = False
        num_tokens = 0
        while num_tokens < TOKENS_A_TURN:
            if self._socket.closed:
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_heard = time.monotonic()
            if self._process is not None:
                self._process.on_sign_of_life()
            message = self._decode(data)
            num_tokens += len(message.events) + len(message.uids) if isinstance(message, Outputs) else 1
            self._dispatch(message)
        self._look_soon()

    def _decode(self, data: bytes) -> ToFrontend:
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            log.error("unreadable message of %d bytes from the engine: %s", len(data), error)
            return Unreadable()

    def _dispatch(self, message: ToFrontend) -> None:
        match message:
            case Outputs():
                self._deliver_tokens(message.uids, message.tokens)
                self._deliver_events(message.events)
            case Rejected():
                if (call := self._open.pop(message.uid, None)) is not None:
                    call.meter.rejected(message.code or "other")
                    call.sink.on_failed(RequestFailed.from_rejected(message))
            case EngineStatus():
                self._on_status(message)
            case Unreadable():
                # It may have been about any of them, and a token that is missing would go unnoticed.
                log.error("a message was damaged: %d open requests fail", len(self._open))
                self.fail_all(RequestFailed("a message about this request was damaged", status=500, code="damaged"))
            case CacheFlushed():
                if (answer := self._flushes.get(message.call)) is not None and not answer.done():
                    answer.set_result(message.num_tokens)
            case Observation():
                if self.on_observation is not None:
                    self.on_observation(message)

    def _deliver_tokens(self, uids: list[int], tokens: list[int]) -> None:
        """The path that nearly every token takes."""
        now = self._last_heard
        for uid, token in zip(uids, tokens, strict=True):
            if (call := self._open.get(uid)) is None:
                continue  # aborted meanwhile
            call.meter.on_token(now)
            try:
                call.sink.on_token(token)
            except Exception:
                self._give_up(uid, call)

    def _deliver_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            if (call := self._open.get(event.uid)) is None:
                continue
            try:
                self._deliver(event, call.sink, call.meter)
            except Exception:
                self._give_up(event.uid, call)

    def _give_up(self, uid: int, call: _Open) -> None:
        """Our fault: what the engine said could not be made an answer. The others of its message must not suffer."""
        log.exception("a request failed between the engine and its client")
        call.meter.failed()
        self.abort(uid)
        call.sink.on_failed(RequestFailed("internal error", status=500, code="internal_error"))

    def _deliver(self, event: TokenEvent, sink: Sink, meter: RequestMeter) -> None:
        if event.finish is None:
            meter.on_tokens(event, self._last_heard)
            sink.on_tokens(event)
            return
        del self._open[event.uid]
        match event.finish:
            case FinishReason.ERROR:
                meter.failed()
                sink.on_failed(RequestFailed(event.error or "generation failed", status=500, code="generation_failed"))
            case FinishReason.ABORT:
                meter.aborted()
                sink.on_failed(RequestFailed("the request was aborted", status=499, code="request_aborted"))
            case FinishReason.STOP | FinishReason.LENGTH:
                meter.on_tokens(event, self._last_heard)
                meter.succeeded(event.finish.value)
                sink.on_tokens(event)

    # ---- life and death of the engine ----

    def _on_status(self, status: EngineStatus) -> None:
        if self.status is None or status.pid != self.status.pid:
            if self.status is not None:
                self._fail_open("the engine was restarted")
            self._forget_process()
            self._process = EngineProcess(status.pid, self._loop, self._on_death)
        self.status = status
        self._died = ""
        for waiter in self._status_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._status_waiters.clear()

    def _forget_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _on_death(self) -> None:
        assert self.status is not None
        log.error("engine process %d is gone: %d open requests fail", self.status.pid, len(self._open))
        self._died = f"the engine process {self.status.pid} died; a new one is being started"
        self.status = None
        self._forget_process()
        self._disconnect()
        self._last_heard = -math.inf
        self._fail_open("the engine died while it worked on this request")
        self._connect()

    def _fail_open(self, why: str) -> None:
        failed, self._open = self._open, {}
        for call in failed.values():
            call.meter.failed()
            call.sink.on_failed(RequestFailed(why, status=503, code="engine_dead", retry_after_s=2))
