"""Keys, browsers, a short queue, a stuck engine, and bodies of megabytes."""

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from radixserve.tests.contract.api import CHAT, COMPLETIONS, Api, chat_body, comp_body, launched, refused
from radixserve.tests.contract.load import Leaver, Reader
from radixserve.tests.e2e.server_process import running_server

KEY = "k-Test_123"
FLOODING_KEY = "k-flood_456"
ORIGIN = "http://localhost:3000"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    others = tmp_path_factory.mktemp("keys") / "keys"
    others.write_text(f"{FLOODING_KEY} flood\n")
    flags = ("--api-key", KEY, "--api-key-file", str(others), "--cors-allow-origins", ORIGIN, "--health-timeout", "2")
    queue = ("--max-num-seqs", "2", "--max-num-queued-reqs", "8")
    with launched(*flags, *queue, headers={"authorization": f"Bearer {KEY}"}) as running:
        yield running


def wait_for_stats(api: Api, **expected: int) -> dict[str, int]:
    deadline = time.monotonic() + 90
    while True:
        stats: dict[str, int] = api.http.get("/server_info").json()["stats"]
        if all(stats[name] == value for name, value in expected.items()):
            return stats
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)


def wait_idle(api: Api) -> None:
    stats = wait_for_stats(api, running=0, waiting=0)
    assert stats["kv_free_tokens"] + stats["kv_evictable_tokens"] == stats["kv_total_tokens"]


def test_probes_and_preflights_need_no_key(api: Api) -> None:
    with httpx.Client(base_url=api.server.url, headers={"origin": ORIGIN}) as http:
        assert http.get("/health").status_code == 200
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        preflight = http.options(CHAT, headers=asked)
        assert preflight.status_code in (200, 204)
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            for path in (CHAT, "/tokenize", "/flush_cache"):
                answer = http.post(path, json=chat_body("hi", max_tokens=1), headers=headers)
                refused(answer, 401)
                assert answer.headers["access-control-allow-origin"] == ORIGIN, "or a browser cannot read the error"
    assert api.chat("hi", max_tokens=1)


def test_overflowing_queue_answers_everybody(api: Api) -> None:
    def ask(index: int) -> httpx.Response:
        with httpx.Client(base_url=api.server.url, headers=api.http.headers, timeout=60) as own:
            return own.post(COMPLETIONS, json=comp_body("1, 2, 3,", max_tokens=8, stream=index % 2 == 0))

    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(ask, range(60)))
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(served) >= 10
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in served if "event-stream" in answer.headers[TYPE])
    for answer in answers:
        if answer not in served:
            assert refused(answer, 429)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
    wait_idle(api)


def test_a_key_that_floods_leaves_others_a_place_in_the_queue_and_a_seat(api: Api) -> None:
    endless = comp_body("Once upon a time", max_tokens=4000, ignore_eos=True)
    flood = [Leaver(api, COMPLETIONS, endless, FLOODING_KEY) for _ in range(14)]
    try:
        wait_for_stats(api, running=2, waiting=8)
        assert api.comp("1, 2, 3,", max_tokens=4)["usage"]["completion_tokens"] == 4
        stats = wait_for_stats(api, running=2, waiting=8)
        assert stats["retracted"] == 1, "one of the flood has stepped back, and is running again"
    finally:
        for leaver in flood:
            leaver.close()
    wait_idle(api)


TYPE = "content-type"


def test_idle_connections_hold_up_nobody(api: Api) -> None:
    host, port = api.server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(300)]
    try:
        assert api.is_alive()
    finally:
        for connection in idle:
            connection.close()


def test_bodies_of_megabytes_hold_up_nobody(api: Api) -> None:
    done = threading.Event()

    def probe() -> int:
        with httpx.Client(base_url=api.server.url, timeout=10) as http:
            for count in itertools.count(1):
                assert http.get("/health").status_code == 200
                if done.wait(0.05):
                    return count
        raise AssertionError

    words = "lorem ipsum dolor sit amet "
    with ThreadPoolExecutor(8) as pool:
        prober = pool.submit(probe)
        sizes = [5_000_000, 25_000_000, *[1_000_000] * 4]
        answers = list(pool.map(lambda size: api.post(CHAT, chat_body(words * (size // len(words)))), sizes))
        assert refused(api.post(CHAT, chat_body(words * 1_400_000)), 413)["code"] == "body_too_large"
        done.set()
        assert prober.result() >= 2  # at its start and at its end, if the bodies are through sooner than that
    for answer in answers:
        assert refused(answer)["code"] == "context_length_exceeded"


def test_stuck_engine_makes_health_say_so_and_goes_on_after(api: Api) -> None:
    engine = int(api.http.get("/server_info").json()["engine_pid"])
    os.kill(engine, signal.SIGSTOP)
    try:
        _wait_for_health(api, 503)
        assert "silent" in api.http.get("/health").json()["reason"]
        refused(api.post(CHAT, chat_body("hi", max_tokens=1)), 503)
    finally:
        os.kill(engine, signal.SIGCONT)
    _wait_for_health(api, 200)
    assert api.is_alive()
    assert int(api.http.get("/server_info").json()["engine_pid"]) == engine


def _wait_for_health(api: Api, status: int) -> None:
    deadline = time.monotonic() + 15
    while api.http.get("/health").status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_template_that_is_broken_ends_the_start_with_its_name(tmp_path: object) -> None:
    template = f"{tmp_path}/broken.jinja"
    with open(template, "w") as file:
        file.write("{% if %}")
    with running_server("--chat-template", template, wait=False) as server:
        assert server.process.wait(60) != 0
        assert "broken.jinja" in server.log()
        assert "Traceback" not in server.log()


def test_stop_while_the_model_loads() -> None:
    with running_server(wait=False) as server:
        deadline = time.monotonic() + 20
        while len(server.children()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = [server.process.pid, *server.children()]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in family)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_long_prompts_of_full_size_leave_tokens_for_a_stream() -> None:
    with launched("--max-num-batched-tokens", "128", timeout=600) as api:
        victim = Reader(api, comp_body("Once upon a time", max_tokens=400, ignore_eos=True))
        victim.wait_for(50)
        with ThreadPoolExecutor(4) as pool:
            longs = [pool.submit(api.comp, [[token] + list(range(1000, 8000))], max_tokens=1) for token in range(4)]
            assert api.is_alive()
            assert not all(long.done() for long in longs)
            assert all(long.result() for long in longs)
        assert victim.text()
