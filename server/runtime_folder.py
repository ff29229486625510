"""A private folder for the engine's socket, gone when the server is."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "radixserve-"
_LOCK_NAME = "lock"
_MAX_BASE_BYTES = 107 - 40  # the longest path of a unix socket, less what we add to the base


@contextmanager
def runtime_folder() -> Iterator[Path]:
    """Make a folder that only this user can enter, and remove it in the end, with those that killed servers left.

    Its owner holds a lock on a file in it, so a folder without a holder is known to be left over, whatever process
    ids are in use by now, and in whichever container the owner ran.
    """
    base = _base_folder()
    _remove_left_over(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    with open(folder / "new-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Named only when it is held: one who finds it unheld may remove the folder.
        os.rename(lock.name, folder / _LOCK_NAME)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _base_folder() -> Path:
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if candidate and os.access(candidate, os.W_OK | os.X_OK) and len(os.fsencode(candidate)) <= _MAX_BASE_BYTES:
            return Path(candidate)
    return Path("/tmp")


def _remove_left_over(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*/{_LOCK_NAME}"):
        try:
            with open(path, "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, somebody else's, or just removed
            continue
        shutil.rmtree(path.parent, ignore_errors=True)
