"""One frontend with a fake engine for all tests of this folder that only talk to it, and one that reasons and calls."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from radixserve.tests.server.byte_model import TEMPLATE, write_byte_model
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


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A frontend whose model reasons, and calls tools."""
    folder = Path(tmp_path_factory.mktemp("t"))
    # Knows of tools, and says so in few tokens: a context is 512 bytes here.
    model = write_byte_model(folder / "model", template=TEMPLATE + "{% if tools %}T{% endif %}")
    with running_service(folder, model=str(model), reasoning_parser="qwen3") as running:
        yield running


@pytest.fixture(scope="module")
def own(thinker: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=thinker.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(thinker: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=20) as openai_client:
        yield openai_client
