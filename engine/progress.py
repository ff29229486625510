"""Shows people how far loading is: a bar on a terminal, lines elsewhere. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm  # type: ignore[import-untyped]

Show = Callable[[str, float], None]
_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def shown_progress(write_line: Callable[[str], None]) -> Iterator[Show]:
    """Scope of a ``weights.Progress`` that draws a bar if standard error is a terminal, and else writes lines."""
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
