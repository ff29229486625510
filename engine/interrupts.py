"""Ctrl-C between steps, never inside one: a step that is half taken in would leave pages and requests astray."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """Scope that keeps SIGINT back until ``check`` is called or the scope ends; then whoever handled it before gets it
    (which raises ``KeyboardInterrupt`` as a rule). A second one arrives at once, in case that a step hangs.

    Does nothing outside of the main thread, where Python delivers no signals.
    """

    def __init__(self) -> None:
        self._active = threading.current_thread() is threading.main_thread() and callable(
            signal.getsignal(signal.SIGINT)
        )
        self._pending = False

    def __enter__(self) -> Interrupts:
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._keep)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)
            if error is None:
                self.check()

    def check(self) -> None:
        """Deliver a SIGINT that arrived since the last call."""
        if self._pending:
            self._deliver(None)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._deliver(frame)
        self._pending = True

    def _deliver(self, frame: FrameType | None) -> None:
        self._pending = False
        assert callable(self._before), "not active otherwise"
        self._before(signal.SIGINT, frame)
