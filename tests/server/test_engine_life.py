"""An engine that loads, is silent, dies and comes back: health tells the truth, and every client gets an end."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixserve.configs.schema import ServeConfig
from radixserve.engine.text.detokenizer import IncrementalDetokenizer
from radixserve.server import engine_client
from radixserve.tests.server.byte_model import write_byte_model
from radixserve.tests.server.clients import chunks_in
from radixserve.tests.server.fake_engine import running_engine
from radixserve.tests.server.service import COMPLETIONS, running_frontend, running_service, wait_until

LONG: dict[str, Any] = {"prompt": "{slow}<<a>>", "ignore_eos": True}


def health(url: str) -> httpx.Response:
    return httpx.get(f"{url}/health", timeout=5)


@contextmanager
def engine_process(address: str) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(__file__).with_name("fake_engine.py")
    process = subprocess.Popen([sys.executable, str(script), address])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_health_before_there_is_an_engine_and_while_it_loads(folder: Path) -> None:
    config = ServeConfig(model=str(write_byte_model(folder / "model")), load_format="dummy")
    with running_frontend(config, f"ipc://{folder}/nobody") as (url, _):
        answer = health(url)
        assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        assert httpx.post(f"{url}{COMPLETIONS}", json={"prompt": "x"}, timeout=5).status_code == 503
        assert httpx.head(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] is None
    with running_service(folder, phase="loading", wait=False) as service:
        wait_until(lambda: health(service.url).json().get("progress") == 0.25)
        assert health(service.url).json()["reason"] == "weights"
        refused = httpx.post(f"{service.url}{COMPLETIONS}", json={"prompt": "x", "stream": True})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        service.engine.phase = "ready"
        wait_until(lambda: health(service.url).status_code == 200)
        service.engine.phase = "failed"
        wait_until(lambda: health(service.url).json()["status"] == "failed")


def test_unreadable_model_is_a_failure_that_tells_no_paths(folder: Path) -> None:
    with running_service(folder, wait=False, model=str(folder / "nowhere")) as service:
        wait_until(lambda: health(service.url).json()["status"] == "failed")
        assert str(folder) not in health(service.url).text
        wait_until(service.frontend.failed.is_set)


def test_stuck_engine_is_unhealthy_until_it_goes_on(folder: Path) -> None:
    with running_service(folder, health_timeout=0.5) as service:
        answers: list[httpx.Response] = []
        body = {**LONG, "max_tokens": 30}
        post = lambda: answers.append(httpx.post(f"{service.url}{COMPLETIONS}", json=body, timeout=20))  # noqa: E731
        waiting = threading.Thread(target=post)
        waiting.start()
        wait_until(lambda: bool(service.engine.running))
        service.engine.freeze(True)
        wait_until(lambda: health(service.url).json()["status"] == "stuck")
        assert httpx.post(f"{service.url}{COMPLETIONS}", json={"prompt": "x"}, timeout=3).status_code == 503
        service.engine.freeze(False)
        wait_until(lambda: health(service.url).status_code == 200)
        waiting.join(20)
        assert answers[0].status_code == 200


def test_killed_engine_ends_every_request_and_the_next_one_serves(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServeConfig(model=str(write_byte_model(folder / "model")), load_format="dummy")
    address = f"ipc://{folder}/engine"
    with running_frontend(config, address) as (url, frontend):
        with engine_process(address) as engine:
            wait_until(lambda: health(url).status_code == 200, 20)
            answers: list[httpx.Response] = []

            def post(stream: bool) -> None:
                answers.append(httpx.post(f"{url}{COMPLETIONS}", json={**LONG, "stream": stream}, timeout=20))

            clients = [threading.Thread(target=post, args=(i % 2 == 0,)) for i in range(6)]
            for client in clients:
                client.start()
            wait_until(lambda: frontend.client.num_open == 6)
            engine.send_signal(signal.SIGKILL)
            for client in clients:
                client.join(5)
            assert len(answers) == 6, "everybody has an answer"
            for answer in answers:
                if answer.status_code == 200:
                    last = [line for line in answer.text.split("\n\n") if line][-1]
                    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
                else:
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            assert health(url).json()["status"] == "dead"
            assert httpx.post(f"{url}{COMPLETIONS}", json={"prompt": "x"}, timeout=3).status_code == 503
        with engine_process(address):
            wait_until(lambda: health(url).status_code == 200, 20)
            answer = httpx.post(f"{url}{COMPLETIONS}", json={"prompt": "<<again>>"}, timeout=10)
            assert answer.json()["choices"][0]["text"] == "again"
            assert frontend.client.num_open == 0
        wait_until(lambda: health(url).json()["status"] == "dead")
        # The second one took no request along, and that it died is said by its supervisor.
        assert [line for line in caplog.messages if "is gone" in line] == [
            f"engine process {engine.pid} is gone: 6 open requests fail"
        ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_in_one_answer_spares_its_neighbours(
    folder: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = IncrementalDetokenizer.feed

    def fragile(self: IncrementalDetokenizer, token_id: int) -> str:
        if token_id == ord("!"):
            raise RuntimeError("a bug")
        return feed(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "feed", fragile)
    with running_service(folder) as service:
        answers: dict[str, str] = {}

        def post(said: str) -> None:
            body = {"prompt": f"{{slow}}<<{said}>>", "stream": stream}
            answers[said] = httpx.post(f"{service.url}{COMPLETIONS}", json=body, timeout=20).text

        clients = [threading.Thread(target=post, args=(said,)) for said in ("spared", "al!as", "the end!")]
        for client in clients:
            client.start()
        for client in clients:
            client.join(20)
        assert ["internal_error" in answers[said] for said in ("spared", "al!as", "the end!")] == [False, True, True]
        assert stream or json.loads(answers["spared"])["choices"][0]["text"] == "spared"
        wait_until(lambda: not service.engine.running and service.frontend.client.num_open == 0)


def test_streams_do_without_our_own_connections(folder: Path) -> None:
    config = ServeConfig(model=str(write_byte_model(folder / "model")), load_format="dummy")
    address = f"ipc://{folder}/engine"
    with running_engine(address), running_frontend(config, address, HttpToolsProtocol) as (url, _):
        wait_until(lambda: health(url).status_code == 200)
        body = {"prompt": "<<word by word>>", "stream": True}
        found = chunks_in(httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=10).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in found) == "word by word"


def test_a_silent_engine_is_ended_by_the_watchdog_and_the_next_one_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "TICK_S", 0.1)
    monkeypatch.setattr(engine_client, "ABORT_GRACE_S", 0.3)
    model = str(write_byte_model(folder / "model"))
    config = ServeConfig(model=model, load_format="dummy", health_timeout=0.5, watchdog_timeout=2)
    address = f"ipc://{folder}/engine"
    with running_frontend(config, address) as (url, frontend):
        with engine_process(address) as engine:
            wait_until(lambda: health(url).status_code == 200, 20)
            answers: list[httpx.Response] = []
            post = lambda: answers.append(httpx.post(f"{url}{COMPLETIONS}", json=LONG, timeout=20))  # noqa: E731
            client = threading.Thread(target=post)
            client.start()
            wait_until(lambda: frontend.client.num_open == 1)
            engine.send_signal(signal.SIGSTOP)  # no handler runs any more, as in a call that holds the interpreter
            assert engine.wait(10) == -signal.SIGKILL
            client.join(5)
            assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "engine_dead")
        with engine_process(address):
            wait_until(lambda: health(url).status_code == 200, 20)


def test_a_damaged_message_fails_those_it_may_have_been_about_and_nobody_else(folder: Path) -> None:
    with running_service(folder) as service:
        answers: list[httpx.Response] = []
        post = lambda: answers.append(httpx.post(f"{service.url}{COMPLETIONS}", json=LONG, timeout=20))  # noqa: E731
        client = threading.Thread(target=post)
        client.start()
        wait_until(lambda: bool(service.engine.running))
        service.engine.damage_next()
        client.join(5)
        assert answers[-1].json()["error"]["code"] == "damaged"
        wait_until(lambda: not service.engine.running)  # aborted, too
        answer = httpx.post(f"{service.url}{COMPLETIONS}", json={"prompt": "<<on>>"}, timeout=10)
        assert answer.json()["choices"][0]["text"] == "on"
