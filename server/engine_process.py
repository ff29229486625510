"""The engine's process as a frontend sees it: its end is noticed at once, and a silent one is ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable

from radixserve.engine.lifeline import is_alive

log = logging.getLogger("radixserve.server")

# From SIGABRT, which makes it write its stack, to SIGKILL: one that is stopped, or stuck in the kernel, hears no other.
ABORT_GRACE_S = 3.0


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
