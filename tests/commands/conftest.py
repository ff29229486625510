"""One frontend with a fake engine for the commands that talk to a server."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixserve.tests.server.service import Service, running_service


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as running:
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    """Like ``tmp_path``, but short: the path of a unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
