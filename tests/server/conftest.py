"""One frontend with a fake engine for all tests of this folder that only talk to it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from radixserve.tests.server.service import Service, running_service


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder), max_body_mb=8.0) as running:
        yield running


@pytest.fixture(scope="session")
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=20) as client:
        yield client


@pytest.fixture
def folder() -> Iterator[Path]:
    """Like ``tmp_path``, but short: the path of a unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
