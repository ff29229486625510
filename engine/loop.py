"""The engine's main loop: messages in, steps, messages out, heartbeats. No torch."""

import os
import time
from collections.abc import Callable
from typing import assert_never

from radixserve.engine import messages
from radixserve.engine.built import BuiltEngine
from radixserve.engine.frontends import Frontends
from radixserve.engine.intake import Intake
from radixserve.engine.observation import INTERVAL_S
from radixserve.engine.pipeline import StepPipeline
from radixserve.engine.scheduler import Scheduler
from radixserve.engine.watch import EngineWatch

HEARTBEAT_S = 0.5
_LOOK_FOR_GRAMMARS_MS = 5
_SHOW_MS = int(INTERVAL_S * 1000)


class EngineLoop:
    """Moves messages between the frontends and the scheduler, and keeps the step pipeline going.

    While the runner computes in this thread ``built.pulse`` beats, so that frontends hear that a long step gets on.
    """

    def __init__(self, frontends: Frontends, scheduler: Scheduler, built: BuiltEngine) -> None:
        self._frontends = frontends
        self._scheduler = scheduler
        self._built = built
        self._intake = Intake(scheduler, built.grammars)
        self._watch = EngineWatch(scheduler, built.cache)
        self._pipeline = StepPipeline(scheduler, built.runner, overlap=built.overlap, on_plan=self._watch.planned)
        self._next_heartbeat = 0.0
        self._last_told = 0.0
        built.pulse.listen(self._beat)
        self._checked = False  # integrity, since the last step

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Serve until ``should_stop``, which is asked between steps and at each heartbeat."""
        while not should_stop():
            self._turn()

    def _turn(self) -> None:
        """At most one step. Blocks only when idle, and then no longer than to the next heartbeat."""
        for frontend, news in self._intake.advance():
            self._frontends.send(frontend, news)
        busy = self._pipeline.advance()
        for frontend, outputs in self._scheduler.take_outputs().items():
            self._frontends.send(frontend, outputs)
        received = self._frontends.receive(0 if busy else self._ms_to_wait())
        for frontend, message in received:
            self._handle(frontend, message)
        for frontend in self._frontends.take_gone():
            self._intake.forget_frontend(frontend)
        if (shown := self._watch.take()) is not None:
            for frontend in shown[0]:
                self._frontends.send(frontend, messages.Observation(self._status().stats, shown[1]))
        if time.monotonic() >= self._next_heartbeat:
            self._heartbeat(is_quiet=not busy and not received)
        if busy:
            self._checked = False

    def _heartbeat(self, *, is_quiet: bool) -> None:
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        for frontend, rejected in self._scheduler.expire():
            self._frontends.send(frontend, rejected)
        self._tell_status()
        if is_quiet and not self._checked:
            # Once in each quiet period. An error ends the process, which is then replaced.
            self._scheduler.check_integrity()
            self._checked = True

    def _handle(self, frontend: bytes, message: messages.ToEngine) -> None:
        match message:
            case messages.Submit():
                if (rejected := self._intake.submit(frontend, message)) is not None:
                    self._frontends.send(frontend, rejected)
            case messages.Abort(uid):
                self._intake.abort(frontend, uid)
            case messages.AbortRequest(request_id):
                self._intake.abort_request(request_id)
            case messages.FlushCache(call):
                self._frontends.send(frontend, messages.CacheFlushed(call, self._scheduler.flush_cache()))
            case messages.Watch(anew):
                self._watch.renew(frontend, anew=anew)
            case messages.Hello() | messages.Ping():
                self._frontends.send(frontend, self._status())
            case _:
                assert_never(message)

    def _ms_to_wait(self) -> int:
        """To the next heartbeat; less while a grammar is compiled, whose end sends no message, or somebody watches."""
        to_heartbeat = max(0, int(1000 * (self._next_heartbeat - time.monotonic())) + 1)
        if self._intake.num_compiling:
            return min(to_heartbeat, _LOOK_FOR_GRAMMARS_MS)
        return min(to_heartbeat, _SHOW_MS) if self._watch.watched else to_heartbeat

    def _beat(self) -> None:
        """Within a step."""
        if time.monotonic() >= self._last_told + HEARTBEAT_S:
            self._tell_status()

    def _tell_status(self) -> None:
        self._last_told = time.monotonic()
        self._frontends.tell_all(self._status())

    def _status(self) -> messages.EngineStatus:
        stats = self._scheduler.stats()
        stats.waiting += self._intake.num_compiling
        limits, description = self._built.limits, self._built.description
        return messages.EngineStatus(
            os.getpid(), "ready", description, 1.0, limits.max_model_len, limits.vocab_size, stats
        )
