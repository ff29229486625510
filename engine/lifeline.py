"""A child process's end of the pipe that ties it to the supervisor. Standard library and configs only, no torch.

The supervisor holds the other end of the child's standard input. The first line is the configuration, each later line
a command (``drain SECONDS``), and the end of the pipe means that the supervisor is gone or wants the child gone. So no
child outlives the supervisor, however that one died, and secrets are on no command line.

A child's ``main`` begins with ``config = lifeline.read_config()`` and then ``lifeline.watch(on_drain=...)``.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

from radixserve.configs.schema import ServeConfig

# Environment of the children.
IPC_VARIABLE = "RADIXSERVE_IPC"  # ZMQ address of the engine's socket
LISTEN_FD_VARIABLE = "RADIXSERVE_LISTEN_FD"  # workers only: the inherited listening socket
URL_VARIABLE = "RADIXSERVE_URL"  # where the server listens, for people to read

# Exit status of a child that would fail the same way again (no such model, ...): it is not restarted.
EXIT_HOPELESS = 3

_STDIN_FD, _STDERR_FD = 0, 2
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def read_config() -> ServeConfig:
    """Take the configuration from the lifeline; the first thing that a child does.

    From here on SIGINT, SIGTERM and SIGHUP are ignored: a terminal sends them to the whole group, but only the
    supervisor knows when it is this process's turn to leave. (It starts us with all blocked, so that none arrives too
    early.)
    Ends a process that was not started by a supervisor.
    """
    for stop_signal in _STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    line = b"" if os.isatty(_STDIN_FD) else _read_line(_STDIN_FD)
    if not line:
        say("radixserve: no configuration on standard input: this process is started by `radixserve serve`")
        raise SystemExit(EXIT_HOPELESS)
    return ServeConfig.model_validate_json(line)


def watch(on_drain: Callable[[float], None] | None = None) -> None:
    """Obey the lifeline from now on, in a daemon thread: leave the process at once when it ends.

    ``on_drain`` is called in that thread with the seconds that running requests get; it must return quickly.
    """
    # The pipe's end is seen by a thread, which a C call that keeps the GIL could delay; the kernel is not delayed.
    end_with_parent(signal.SIGKILL)
    pipe = os.dup(_STDIN_FD)
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), _STDIN_FD)  # so that no grandchild (a compiler, ...) eats our commands
    threading.Thread(target=_obey, args=(pipe, on_drain), name="lifeline", daemon=True).start()


def end_with_parent(stop_signal: signal.Signals) -> None:
    """Let the kernel send ``stop_signal`` to this process when its parent dies. Does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, stop_signal)


def say(line: str) -> None:
    """Write to standard error, unbuffered; that it is full or closed is no reason to end in another way."""
    with contextlib.suppress(OSError):
        os.write(_STDERR_FD, line.encode(errors="replace") + b"\n")


def is_alive(pid: int) -> bool:
    """Whether a process of that id exists, ours or somebody else's."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _obey(pipe: int, on_drain: Callable[[float], None] | None) -> None:
    while line := _read_line(pipe):
        match line.split():
            case [b"drain", seconds]:
                if on_drain is not None:
                    on_drain(float(seconds))
            case _:
                say(f"lifeline: unknown command {line!r}")
    os._exit(0)


def _read_line(pipe: int) -> bytes:
    """The next line, or b"" at the end. Byte by byte and unbuffered: a daemon thread that waits inside
    ``sys.stdin`` holds its lock, and the interpreter aborts on that when the process exits."""
    line = bytearray()
    while byte := os.read(pipe, 1):
        if byte == b"\n":
            return bytes(line)
        line += byte
    return b""
