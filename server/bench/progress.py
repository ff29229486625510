"""How far a load is, although processes of their own make it: they append a byte to a file for each conversation that
has ended, and a thread looks at its size now and then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from radixserve.engine.loading import shown_progress

_LOOK_S = 0.5


@contextmanager
def shown_count(what: str, total: int) -> Iterator[Path]:
    """The file to append to, and a bar or lines on standard error within the scope."""
    ended = threading.Event()
    with NamedTemporaryFile() as file, shown_progress(lambda line: print(line, file=sys.stderr, flush=True)) as show:
        path = Path(file.name)

        def look() -> None:
            count = path.stat().st_size
            show(f"{what}: {count} of {total} conversations", count / total)

        def watch() -> None:
            while not ended.wait(_LOOK_S):
                look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield path
        finally:
            ended.set()
            thread.join()
        look()
