"""Has the kernel read files before they are needed. Who copies weights out of a mapped file waits for each page that it
touches first; a disk is faster when it is asked for much at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_BYTES_AT_ONCE = 64 << 20


@contextmanager
def reading_ahead(paths: Sequence[Path], free_bytes: int) -> Iterator[None]:
    """Have ``paths`` read in their order while the body runs. Not if they take more than ``free_bytes``: the kernel
    would give up what is read first before it is used."""
    if sum(path.stat().st_size for path in paths) > free_bytes:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_read_ahead, args=(paths, ended), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read_ahead(paths: Sequence[Path], ended: threading.Event) -> None:
    for path in paths:
        with path.open("rb") as file:
            for start in range(0, path.stat().st_size, _BYTES_AT_ONCE):
                if ended.is_set():
                    return
                # Returns once the disk is asked, which takes about as long as reading does when its queue is full.
                os.posix_fadvise(file.fileno(), start, _BYTES_AT_ONCE, os.POSIX_FADV_WILLNEED)
