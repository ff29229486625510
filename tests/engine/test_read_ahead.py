"""Files are asked for in their order while a body runs, and not where memory is short."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from radixserve.engine.load_model import reading_ahead

STEP = 128 << 10  # what Linux reads for one such call, whatever it asks for, unless it is told to read further ahead
Asked = list[tuple[str, int]]


@pytest.fixture
def files(tmp_path: Path) -> Sequence[Path]:
    """Two sparse ones, of 100 and 70 MiB."""
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, size in zip(paths, (100 << 20, 70 << 20), strict=True):
        path.touch()
        os.truncate(path, size)
    return paths


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the kernel was asked to read: name of the file, first byte."""
    found: Asked = []

    def record(descriptor: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED and length == STEP
        found.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, start))

    monkeypatch.setattr(os, "posix_fadvise", record)
    return found


def test_all_of_every_file_is_asked_for_in_order(files: Sequence[Path], asked: Asked) -> None:
    with reading_ahead(files, free_bytes=1 << 30):
        for reader in (thread for thread in threading.enumerate() if thread.name == "read-ahead"):  # may have ended
            reader.join(10)
    sizes = {"first": 100 << 20, "second": 70 << 20}
    assert asked == [(name, start) for name, size in sizes.items() for start in range(0, size, STEP)]


def test_nothing_is_asked_for_that_would_not_stay_in_memory(files: Sequence[Path], asked: Asked) -> None:
    with reading_ahead(files, free_bytes=160 << 20):
        assert not any(thread.name == "read-ahead" for thread in threading.enumerate())
    assert asked == []


def test_reading_ends_with_its_body_whatever_happens_there(
    files: Sequence[Path], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def wait(descriptor: int, start: int, length: int, advice: int) -> None:
        begun.set()
        assert may_go_on.wait(10)
        asked.append(("one", start))

    monkeypatch.setattr(os, "posix_fadvise", wait)
    with pytest.raises(ValueError, match="bad"), reading_ahead(files, free_bytes=1 << 30):
        assert begun.wait(10)
        threading.Timer(0.5, may_go_on.set).start()
        raise ValueError("bad")
    assert 0 < len(asked) < 4
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())
