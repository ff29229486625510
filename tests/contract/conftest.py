"""The servers of this folder, one for each way to launch it, and the model's text side as an oracle."""

from collections.abc import Iterator

import pytest

from radixserve.configs.schema import DEFAULT_MODEL, ModelOptions
from radixserve.engine.model_files import resolve_model
from radixserve.engine.text.text_model import TextModel, load_text_model
from radixserve.tests.contract.api import Api
from radixserve.tests.e2e.server_process import RunningServer, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """As a user starts it, but in fp32, so that texts can be compared."""
    with running_server("--dtype", "float32") as running:
        yield running
        assert "Traceback" not in running.log()
        running.wait_idle()


@pytest.fixture(scope="session")
def api(server: RunningServer) -> Iterator[Api]:
    api = Api(server)
    yield api
    assert api.is_alive()
    api.http.close()


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    """Tested against transformers and the model's own pre-tokenizer in tests/engine/text, so here it is the oracle."""
    return load_text_model(resolve_model(DEFAULT_MODEL), ModelOptions())
