"""--log-requests: a line for each request of the engine, one for each refusal, and nothing that users wrote."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixserve.tests.server.service import COMPLETIONS, running_service, wait_until

KEY = "0123456789abcdef"


def test_every_end_of_a_request_is_logged_with_its_id_and_without_its_text(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "radixserve.requests"]

    with running_service(folder, log_requests=True, api_key=(KEY,)) as service:
        with httpx.Client(base_url=service.url, headers={"authorization": f"Bearer {KEY}"}) as client:

            def complete(request_id: str, prompt: Any, timeout: float | None = None) -> None:
                body, headers = {"prompt": prompt, "max_tokens": 9}, {"x-request-id": request_id}
                client.post(COMPLETIONS, json=body, headers=headers, timeout=timeout)

            complete("whole", "<<secret>>")
            complete("refused", "{reject}")
            complete("wrong", {"secret": 1})
            with contextlib.suppress(httpx.ReadTimeout):
                complete("left", "{silent}", timeout=0.2)
            wait_until(lambda: any(record.facts["request_id"] == "left" for record in lines()))
        httpx.post(service.url + COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "no-key"})
        httpx.get(service.url + "/health")

    told = [(record.facts["request_id"], record.facts.get("outcome", record.facts.get("status"))) for record in lines()]
    ends = [("whole", "finished"), ("refused", "refused"), ("refused", 429), ("wrong", 400), ("left", "aborted")]
    assert told == [*ends, ("no-key", 401)]
    whole, refused = lines()[:2]
    assert whole.getMessage().startswith("request whole finished (stop): 10 prompt tokens (0 cached), TTFT 0.")
    assert whole.facts["generated_tokens"] == 7 and whole.facts["tenant"] == "key 1"
    assert whole.facts["total_s"] >= whole.facts["ttft_s"] >= 0  # in milliseconds, of which an idle machine needs none
    assert refused.facts["reason"] == "queue_full"
    assert "secret" not in "".join(record.getMessage() + str(record.facts) for record in lines())


def test_nothing_is_logged_of_requests_unless_asked_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running_service(folder) as service:
        assert httpx.post(service.url + COMPLETIONS, json={"prompt": "<<a>>"}).status_code == 200
        assert httpx.post(service.url + COMPLETIONS, json={"prompt": 7}).status_code == 400
    assert [record for record in caplog.records if record.name == "radixserve.requests"] == []
