"""While the model loads: what frontends hear, what people see of it (a bar on a terminal, lines elsewhere), and what
they read when there is no room for it. No torch."""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm  # type: ignore[import-untyped]

from radixserve.engine.errors import ConfigError
from radixserve.engine.frontends import Frontends
from radixserve.engine.loop import HEARTBEAT_S
from radixserve.engine.messages import CacheFlushed, EngineStatus, FlushCache, Hello, Ping, Rejected, Submit

_POLL_MS = 50
_RETRY_AFTER_S = 5.0
_SHOWN_CHARS = 200


Show = Callable[[str, float], None]
"""Called with what is being done, and the share of it that is done, as ``weights.Progress``."""


@contextmanager
def answering(frontends: Frontends) -> Iterator[Show]:
    """Scope in which a thread answers ``frontends`` with heartbeats and refuses requests; nobody else may use them.

    The model is loaded by the caller's thread, because settings of torch and CUDA belong to a thread.
    """
    status = EngineStatus(os.getpid(), "loading", "starting")
    done = threading.Event()

    def show(what: str, share: float) -> None:
        nonlocal status
        status = EngineStatus(os.getpid(), "loading", what, share)

    thread = threading.Thread(target=_answer, args=(frontends, lambda: status, done), name="loading", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        done.set()
        thread.join()


@contextmanager
def explained_lack_of_memory(model: str) -> Iterator[None]:
    """Scope in which ``model`` is loaded. When memory runs out starting again would not help: that is a ``ConfigError``
    with the remedy."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not _is_lack_of_memory(error):
            raise
        reason = str(error).partition("\n")[0][:_SHOWN_CHARS]
        raise ConfigError(
            f"memory ran out while {model} was loaded ({reason}): take a smaller model or --dtype, lower --num-pages "
            "or --max-num-batched-tokens, or give it more memory"
        ) from error


def _is_lack_of_memory(error: Exception) -> bool:
    """torch's own errors are RuntimeErrors that say it in words."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or any(words in str(error) for words in ("allocate memory", "out of memory"))


def _answer(frontends: Frontends, status: Callable[[], EngineStatus], done: threading.Event) -> None:
    """Nothing runs that could be aborted, or watched."""
    next_heartbeat = 0.0
    while not done.is_set():
        for frontend, message in frontends.receive(_POLL_MS):
            match message:
                case Hello() | Ping():
                    frontends.send(frontend, status())
                case Submit(uid):
                    text = "the model is loading; try again later"
                    frontends.send(
                        frontend, Rejected(uid, text, code="loading", status=503, retry_after_s=_RETRY_AFTER_S)
                    )
                case FlushCache(call):
                    frontends.send(frontend, CacheFlushed(call, 0))
        frontends.take_gone()
        if time.monotonic() >= next_heartbeat:
            next_heartbeat = time.monotonic() + HEARTBEAT_S
            frontends.tell_all(status())


_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def shown_progress(write_line: Callable[[str], None]) -> Iterator[Show]:
    """Scope of what draws a bar if standard error is a terminal, and else writes lines."""
    if not sys.stderr.isatty():
        yield ProgressLines(write_line)
        return
    with tqdm(total=1.0, bar_format="{desc} {percentage:3.0f}%|{bar}|", leave=False) as bar:

        def show(what: str, share: float) -> None:
            is_new_phase = what.partition(":")[0] != bar.desc.partition(":")[0]
            bar.set_description_str(what, refresh=False)
            bar.update(share - bar.n)  # draws at most ten times a second
            if is_new_phase:
                bar.refresh()

        yield show


class ProgressLines:
    """A line when a phase begins, when it is done, and every few seconds between. What is before a colon is the
    phase."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line = write_line
        self._phase = ""
        self._last_line = 0.0

    def __call__(self, what: str, share: float) -> None:
        phase, now = what.partition(":")[0], time.monotonic()
        is_done = share >= 1.0
        if phase == self._phase and not is_done and now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._phase, self._last_line = phase, now
        self._write_line(what if is_done else f"{what} ({share:.0%})")
