"""Bodies made from our own OpenAPI document, right and wrong ones: always an answer, never a fault of ours, and the
neighbour's stream goes on."""

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from radixserve.tests.contract.api import Api, comp_body
from radixserve.tests.contract.load import Reader
from radixserve.tests.server.service import COMPLETIONS, Service, running_service

WITH_BODY = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions/render",
)
WITHOUT_BODY = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("POST", "/flush_cache"),
    ("GET", "/version"),
    ("POST", "/v1/embeddings"),
)
ANSWER_S = 10


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """With a fake engine: what is tried here is what reaches no engine, or does so in numbers."""
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def schema(service: Service) -> Any:
    from schemathesis import openapi  # only here: it takes seconds to load

    return openapi.from_dict(httpx.get(f"{service.url}/openapi.json").json())


class Neighbour(threading.Thread):
    """Reads one slow stream from beginning to end while others do what they like."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self._url = url
        self._body = {"prompt": "{slow}<<0123456789>>", "max_tokens": 100, "ignore_eos": True, "stream": True}
        self.lines: list[str] = []

    def run(self) -> None:
        with httpx.stream("POST", self._url + COMPLETIONS, json=self._body, timeout=60) as stream:
            self.lines = [line for line in stream.iter_lines() if line.startswith("data: ")]


@pytest.fixture
def neighbour(service: Service) -> Iterator[None]:
    reader = Neighbour(service.url)
    reader.start()
    yield
    reader.join(60)
    assert reader.lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in reader.lines[:-1]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == "0123456789" * 10, "every token came, however many at once"


Tame = Callable[[dict[str, Any]], None]


def any_model(body: dict[str, Any]) -> None:
    body.pop("model", None)  # nearly every name is the name of no model


def short_answer(body: dict[str, Any]) -> None:
    for name in ("model", "n", "best_of", "max_completion_tokens", "min_tokens", "logit_bias", "stop_token_ids"):
        body.pop(name, None)
    body["max_tokens"] = 2


def fuzz(operation: Any, url: str, mode: str, examples: int, tame: Tame = any_model) -> None:
    from schemathesis import GenerationMode, checks
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
    )

    judged_by = [
        checks.not_a_server_error,
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
        negative_data_rejection,
    ]

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def answered(case: Any) -> None:
        if mode == "positive" and isinstance(case.body, dict):
            tame(case.body)
        answer = case.call(base_url=url, timeout=ANSWER_S)
        case.validate_response(answer, checks=judged_by)

    answered()


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("path", WITH_BODY)
@pytest.mark.usefixtures("neighbour")
def test_any_body_gets_a_proper_answer(service: Service, schema: Any, path: str, mode: str) -> None:
    fuzz(schema[path]["POST"], service.url, mode, 25 if path in WITH_BODY[:2] else 10)
    service.wait_until(lambda: len(service.engine.running) <= 1)


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_aborts_are_answered_too(service: Service, schema: Any, mode: str) -> None:
    fuzz(schema["/abort_request"]["POST"], service.url, mode, 15)


@pytest.mark.parametrize(("method", "path"), WITHOUT_BODY)
def test_routes_without_a_body_answer_as_described(service: Service, schema: Any, method: str, path: str) -> None:
    fuzz(schema[path][method], service.url, "positive", 10)


@pytest.mark.parametrize("path", WITH_BODY[:2])
def test_the_real_engine_goes_on_whatever_reaches_it(api: Api, schema: Any, path: str) -> None:
    known = api.greedy("Once upon a time", 40).text
    neighbour = Reader(api, comp_body("Once upon a time", max_tokens=40))
    for mode in ("positive", "negative"):
        fuzz(schema[path]["POST"], api.server.url, mode, 8, short_answer)
    assert neighbour.text() == known
    assert api.server.wait_idle()["failed"] == 0
