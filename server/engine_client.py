"""What a frontend knows of the engine: its health, its death, and the requests that it works on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixserve.configs.schema import ServerOptions
from radixserve.engine import messages
from radixserve.engine.lifeline import is_alive
from radixserve.server.choice import Choice
from radixserve.server.engine_socket import EngineSocket
from radixserve.server.errors import RequestFailed
from radixserve.server.metrics import Numbers, RequestObserver
from radixserve.server.open_requests import OpenRequests

log = logging.getLogger("radixserve.server")

TICK_S = 1.0
SEARCH_TICK_S = 0.1  # while no engine is known
# A silent engine is greeted again after this time: it may be a new one that has not heard of us.
GREETING_S = 2.0
# The reason itself may name files of the server, which concern no client.
FAILED = "the model could not be loaded; the server's log says why"
# From SIGABRT, which makes it write its stack, to SIGKILL: one that is stopped, or stuck in the kernel, hears no other.
ABORT_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Health:
    """``status``: ok, loading, stuck, dead, failed or (a frontend) draining; ``progress`` in 0..1 while loading."""

    status: str
    reason: str = ""
    progress: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class EngineClient:
    """Owns the line to the engine, the open requests, and what is known of the engine.

    Lives on one event loop: ``start`` and ``close`` are called there, and so is everything else.
    """

    def __init__(
        self,
        address: str,
        options: ServerOptions,
        numbers: Numbers,
        observers: Sequence[Callable[[messages.Submit], RequestObserver]] = (),
    ):
        self._options = options
        self._uids = itertools.count(1)
        self._line = EngineSocket(address, self._on_message)
        self.requests = OpenRequests(self._line.send, numbers, observers)
        self._flushes: dict[int, asyncio.Future[int]] = {}
        self._status_waiters: list[asyncio.Future[None]] = []
        self._process: EngineProcess | None = None
        self._died = ""  # why, until the next engine is heard of
        self._last_greeting = -math.inf
        self.status: messages.EngineStatus | None = None
        self.on_observation: Callable[[messages.Observation], None] | None = None

    # ---- life ----

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._line.connect()
        self._tick()

    def close(self) -> None:
        self._ticker.cancel()
        self._forget_process()
        self._line.close()

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(SEARCH_TICK_S if self.status is None else TICK_S, self._tick)
        now = time.monotonic()
        is_due = now - max(self._line.last_heard, self._last_greeting) > GREETING_S
        if is_due and self._line.send(messages.Hello(os.getpid())):
            self._last_greeting = now
        if self._process is not None and self._process.has_vanished:
            self._on_death()
        if self._process is not None and self.status is not None and self.status.phase == "ready":
            self._process.on_silence(TICK_S, self._options.watchdog_timeout)
        self._line.look_soon()

    # ---- requests ----

    def new_uid(self) -> int:
        return next(self._uids)

    def submit(self, request: messages.Submit, choice: Choice) -> None:
        """Send a request; ``choice`` gets exactly one final event unless ``requests.abort`` comes first.

        Raises ``RequestFailed`` when no engine is there to take it.
        """
        health = self.health()
        if not health.ok:
            raise RequestFailed(f"the engine is not ready: {health.reason}", code="engine_" + health.status)
        if not self._line.send(request):
            raise RequestFailed("the engine does not take requests", code="engine_unreachable", retry_after_s=1)
        self.requests.add(request, choice)

    def abort_by_id(self, request_id: str) -> None:
        """Whichever frontend has it; "" means all. Their clients get an error."""
        self._line.send(messages.AbortRequest(request_id))

    @property
    def num_open(self) -> int:
        return len(self.requests)

    async def flush_cache(self, timeout_s: float = 10.0) -> int:
        """Drop all cached prefixes that nobody uses; returns the number of tokens. Raises ``RequestFailed``."""
        call = next(self._uids)
        answer = self._flushes[call] = self._loop.create_future()
        try:
            if not self._line.send(messages.FlushCache(call)):
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
        silence_s = time.monotonic() - self._line.last_heard
        if silence_s > self._options.health_timeout:
            return Health("stuck", f"the engine has been silent for {silence_s:.0f} s")
        if self.status.phase == "loading":
            return Health("loading", self.status.detail or "the model is loading", self.status.progress)
        if self.status.phase != "ready":
            return Health("failed", FAILED)
        return Health("ok")

    async def fresh_status(self, timeout_s: float = 1.0) -> messages.EngineStatus | None:
        """The engine's status as of now, or the last one known if it does not answer in time."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        if self._line.send(messages.Ping()):
            self._status_waiters.append(waiter)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter, timeout_s)
        return self.status

    def watch(self, *, anew: bool) -> None:
        """Ask for observations of the next seconds, if the engine can be asked."""
        self._line.send(messages.Watch(anew))

    # ---- what the engine says ----

    def _on_message(self, message: messages.ToFrontend) -> None:
        if self._process is not None:
            self._process.on_sign_of_life()
        match message:
            case messages.Outputs():
                self.requests.deliver(message, self._line.last_heard)
            case messages.Rejected():
                self.requests.reject(message)
            case messages.EngineStatus():
                self._on_status(message)
            case messages.Unreadable():
                # It may have been about any of them, and a token that is missing would go unnoticed.
                log.error("a message was damaged: %d open requests fail", self.num_open)
                self.requests.fail_all(
                    RequestFailed("a message about this request was damaged", status=500, code="damaged")
                )
            case messages.CacheFlushed():
                if (answer := self._flushes.get(message.call)) is not None and not answer.done():
                    answer.set_result(message.num_tokens)
            case messages.Observation():
                if self.on_observation is not None:
                    self.on_observation(message)

    # ---- life and death of the engine ----

    def _on_status(self, status: messages.EngineStatus) -> None:
        if self.status is None or status.pid != self.status.pid:
            if self.status is not None:
                self._lose_requests("the engine was restarted")
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
        if self.num_open:  # that it is gone is the supervisor's to say
            log.error("engine process %d is gone: %d open requests fail", self.status.pid, self.num_open)
        self._died = f"the engine process {self.status.pid} died; a new one is being started"
        self.status = None
        self._forget_process()
        self._line.disconnect()
        self._lose_requests("the engine died while it worked on this request")
        self._line.connect()
        self._last_greeting = -math.inf

    def _lose_requests(self, why: str) -> None:
        self.requests.lose_all(RequestFailed(why, code="engine_dead", retry_after_s=2))


class EngineProcess:
    """Owns a descriptor of the process ``pid``, with which no later process can be mistaken for it. ``on_end`` is
    called on ``loop`` when it ends."""

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]):
        self.pid = pid
        self._loop = loop
        self._pidfd: int | None = None
        self._silence_s = 0.0
        # Without pidfds (not Linux, or a sandbox) ``has_vanished`` looks for the process.
        with contextlib.suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(pid)
            loop.add_reader(self._pidfd, on_end)

    def close(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    @property
    def has_vanished(self) -> bool:
        """Whether it ended without ``on_end`` being called."""
        return self._pidfd is None and not is_alive(self.pid)

    def on_sign_of_life(self) -> None:
        self._silence_s = 0.0

    def on_silence(self, seconds: float, limit_s: float) -> None:
        """Nothing came in another ``seconds``; after ``limit_s`` the process is ended, and its supervisor starts the
        next. Count in ticks of the caller: a silence during which the caller was frozen too is not the engine's."""
        self._silence_s += seconds
        if self._silence_s >= limit_s:
            log.error("engine process %d has been silent for %.0f s: ending it", self.pid, self._silence_s)
            self._send(signal.SIGABRT if self._silence_s < limit_s + ABORT_GRACE_S else signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            else:
                os.kill(self.pid, number)
