"""The server that most tests of this folder talk to, and the model's text side as an oracle."""

from collections.abc import Iterator

import pytest

from radixserve.configs.schema import DEFAULT_MODEL, ModelOptions
from radixserve.engine.model_files import resolve_model
from radixserve.engine.text.text_model import TextModel, load_text_model
from radixserve.tests.contract.api import Api, launched


@pytest.fixture(scope="session")
def api() -> Iterator[Api]:
    """The server as a user starts it."""
    with launched() as running:
        yield running
        running.server.wait_idle()


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    """Tested against transformers and the model's own pre-tokenizer in tests/engine/text, so here it is the oracle."""
    return load_text_model(resolve_model(DEFAULT_MODEL), ModelOptions())
