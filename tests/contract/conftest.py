"""The server that most tests of this folder talk to, and the model's text side as an oracle."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
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


@pytest.fixture
def langchain(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes greedy LangChain models of the server. Left to itself LangChain shares one HTTP client per address in the
    process, so one test's closing of it would fail the next test's requests: here each test has its own."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    from langchain_openai import ChatOpenAI  # late: it takes seconds to load

    with openai.DefaultHttpxClient() as http_client:

        def make(**options: Any) -> ChatOpenAI:
            address = {"base_url": f"{api.server.url}/v1", "api_key": "none", "model": DEFAULT_MODEL}
            return ChatOpenAI(**address, http_client=http_client, temperature=0, max_retries=0, **options)

        yield make
