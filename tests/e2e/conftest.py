"""One real server with the default model for all tests of this folder that only talk to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from radixserve.tests.e2e.server_process import RunningServer, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server("--dtype", "float32", "--max-num-seqs", "32") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest) -> Path | None:
    """The folder for screenshots, if they are wanted."""
    folder = request.config.getoption("--screenshots")
    return None if folder is None else Path(folder)
