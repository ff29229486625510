"""One supervised child process: started with a lifeline and its configuration, restarted with growing pauses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_HINTS = {
    "SIGKILL": " (often the kernel's answer to a lack of memory: lower --num-pages or --max-model-len, or allow more; "
    "or the watchdog, if it says so above)",
    "SIGABRT": " (a crash in native code, or the watchdog; where it was stands above)",
}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one: the terminal was closed


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often, and how soon, a child that died is started again."""

    max_restarts: int = 5
    window_s: float = 600.0  # longer than a large model loads, or a loop that dies while loading goes on for ever
    first_pause_s: float = 0.2
    max_pause_s: float = 5.0

    def pause_s(self, deaths: Sequence[float], now: float) -> float | None:
        """Seconds to wait before the next start, or None to give up. ``deaths``: times, the latest included."""
        recent = sum(now - death < self.window_s for death in deaths)
        if recent > self.max_restarts:
            return None
        return float(min(self.first_pause_s * 2 ** (recent - 1), self.max_pause_s))


@dataclass(slots=True)
class Child:
    """Owns the process that runs ``command`` now, if one does, and the write end of its lifeline. ``environment`` is
    added to ours; ``pass_fds`` stay open in the child."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    deaths: list[float] = field(default_factory=list)
    restart_at: float | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None

    def start(self, first_line: str) -> None:
        self.restart_at = None
        # The child inherits the blocked signals, and unblocks them when it ignores them; without this a Ctrl-C during
        # its imports would kill it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                pass_fds=self.pass_fds,
                env={**os.environ, **self.environment},
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.send(first_line)

    def send(self, line: str) -> None:
        """Write a line to the lifeline; a child that is just dying does not hear it."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(line.encode() + b"\n")

    def reap(self) -> int | None:
        """The exit status (negative: the signal) if the process has ended since the last call, else None."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        self.close_lifeline()
        self.process = None
        return status

    def close_lifeline(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}{_HINTS.get(name, '')}"
