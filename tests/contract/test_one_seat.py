"""One request at a time, a context of 512 tokens, two API workers, by priority: limits, queues, and who leaves them."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from radixserve.tests.contract.api import CHAT, COMPLETIONS, Api, chat_body, comp_body, launched, refused
from radixserve.tests.contract.load import Leaver, Reader

CTX = 512
LONG = comp_body("Once upon a time", max_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    flags = ("--max-num-seqs", "1", "--max-model-len", str(CTX), "--api-workers", "2", "--schedule-policy", "priority")
    with launched(*flags) as running:
        yield running
        running.server.wait_idle()


def wait_for_live(api: Api, count: int) -> None:
    deadline = time.monotonic() + 20
    while api.live() != count:
        assert time.monotonic() < deadline, f"{api.live()} requests live, not {count}"
        time.sleep(0.02)


@pytest.mark.parametrize(("length", "max_tokens", "generated"), [(510, 1, 1), (511, 1, 1), (508, 8, 4), (511, 2, 1)])
def test_prompts_up_to_the_context_length(api: Api, length: int, max_tokens: int, generated: int) -> None:
    body = comp_body([[28] * length], max_tokens=max_tokens, ignore_eos=True)
    whole = api.answer(COMPLETIONS, body)
    assert whole["usage"]["completion_tokens"] == generated
    assert whole["choices"][0]["finish_reason"] == "length"
    assert api.streamed(COMPLETIONS, body)[1] == "length"


@pytest.mark.parametrize("length", [CTX, CTX + 1, 2 * CTX])
@pytest.mark.parametrize("stream", [False, True])
def test_longer_prompts_are_refused_with_the_context_length(api: Api, length: int, stream: bool) -> None:
    answer = api.post(COMPLETIONS, {**comp_body([[28] * length], max_tokens=1), "stream": stream})
    error = refused(answer, naming=str(CTX))
    assert error["code"] == "context_length_exceeded" and str(length) in error["message"]
    chat = refused(api.post(CHAT, chat_body("word " * length, max_tokens=1)), naming=str(CTX))
    assert chat["param"] == "messages"


def test_absent_max_tokens_is_the_room_left(api: Api) -> None:
    whole = api.comp([[28] * 506], ignore_eos=True)
    assert whole["usage"]["total_tokens"] == CTX


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_frees_its_seat(api: Api, how: str, stream: bool) -> None:
    aborted = api.server.stats()["aborted"]
    leaver = Leaver(api, COMPLETIONS, {**LONG, "stream": stream})
    wait_for_live(api, 1)
    time.sleep(0.2)
    leaver.leave(how)
    assert api.is_alive()
    assert api.server.wait_idle()["aborted"] == aborted + 1
    leaver.close()


def test_clients_that_leave_the_queue_are_never_started(api: Api) -> None:
    api.server.wait_idle()
    before = api.server.stats()
    running = Reader(api, comp_body("Once upon a time", max_tokens=60, ignore_eos=True))
    running.wait_for(1)
    queued = [Leaver(api, COMPLETIONS, {**LONG, "stream": i % 2 == 0}) for i in range(6)]
    stays = [Reader(api, comp_body("1, 2, 3,", max_tokens=4)) for _ in range(2)]
    wait_for_live(api, 9)
    for leaver in queued:
        leaver.leave()
    wait_for_live(api, 3)
    assert running.text()
    assert len({reader.text() for reader in stays}) == 1
    after = api.server.wait_idle()
    assert after["aborted"] - before["aborted"] == 6
    assert after["generated_tokens"] - before["generated_tokens"] == 60 + 2 * 4


def test_lower_priority_numbers_go_first(api: Api) -> None:
    running = Reader(api, comp_body("Once upon a time", max_tokens=30, ignore_eos=True))
    running.wait_for(1)
    readers = []
    for waiting, priority in enumerate((5, 0, -5), start=2):
        readers.append(Reader(api, comp_body("1, 2, 3,", max_tokens=3, priority=priority)))
        wait_for_live(api, waiting)
    ends = [(reader.text(), reader.times[-1])[1] for reader in readers]
    assert ends == sorted(ends, reverse=True)


def test_both_workers_answer_and_know_all_requests(api: Api) -> None:
    with ThreadPoolExecutor(8) as pool:
        pids = {pid for _ in range(8) for pid in pool.map(lambda _: _worker_pid(api), range(8))}
    assert len(pids) == 2
    running = Reader(api, {**LONG, "request_id": "of-some-worker"})
    running.wait_for(1)
    for _ in range(4):  # whichever worker takes the call
        aborted = api.post("/abort_request", {"request_id": "of-some-worker"})
        assert aborted.status_code == 200
    running.join(10)
    assert "request_aborted" in running.lines[-1]
    api.server.wait_idle()


def _worker_pid(api: Api) -> int:
    with Api(api.server).http as fresh:
        return int(fresh.get("/server_info").json()["worker_pid"])


def test_request_id_is_echoed(api: Api) -> None:
    body = comp_body("hi", max_tokens=1)
    by_header = api.http.post(COMPLETIONS, json=body, headers={"x-request-id": "abc-1"})
    assert by_header.headers["x-request-id"] == "abc-1"
    assert by_header.json()["id"] == "cmpl-abc-1"
    assert api.comp("hi", max_tokens=1, request_id="own.2")["id"] == "cmpl-own.2"
