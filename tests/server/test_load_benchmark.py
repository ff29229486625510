"""``radixserve bench serve``: what it sends, what it measures, and its mistakes; and the workload drawn for it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve.engine.errors import ConfigError
from radixserve.server.bench.streaming import Answer, Connection, Target
from radixserve.server.bench.workload import Workload, arrivals
from radixserve.server.cli import main
from radixserve.tests.server.service import Service

SMALL = ["--prompt-words=2:8", "--max-tokens=3:6", "--processes=1", "--seed=5"]


def loads(service: Service, tmp_path: Path, *flags: str, status: int = 0) -> dict[str, dict[str, float]]:
    path = tmp_path / "figures.json"
    assert main(["bench", "serve", f"--url={service.url}/v1", *SMALL, *flags, f"--json={path}"]) == status
    found: dict[str, dict[str, float]] = json.loads(path.read_text())["loads"]
    return found


def sent(service: Service, first: int) -> list[str]:
    return [bytes(np.frombuffer(s.prompt_ids, np.int32).clip(0, 255).tolist()).decode("latin-1")
            for s in service.engine.submits[first:]]  # fmt: skip


def test_a_closed_loop_is_answered_and_counted(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = len(service.engine.submits)
    found = loads(service, tmp_path, "--clients=1,3", "--requests=7")
    assert list(found) == ["1 clients", "3 clients"] and len(service.engine.submits) == first + 14
    assert len(set(sent(service, first))) == 14, "a prompt is sent again, so it is cached"
    for part, summary in enumerate(found.values()):
        submits = service.engine.submits[first + 7 * part : first + 7 * part + 7]
        tokens = sum(submit.sampling.max_tokens or 0 for submit in submits)
        assert summary["requests"] == 7 and summary["errors"] == 0
        assert summary["output_tokens_per_s"] * summary["wall_s"] == pytest.approx(tokens)
        assert 0 < summary["ttft_p50_ms"] <= summary["ttft_p99_ms"] <= summary["total_p99_ms"]
        assert summary["client_us_per_chunk"] > 0
    told = capsys.readouterr().err.splitlines()
    assert "1 clients: 7 of 7 conversations" in told and told[-1] == "3 clients: 7 of 7 conversations"


def test_an_open_loop_takes_as_long_as_its_arrivals(service: Service, tmp_path: Path) -> None:
    summary = loads(service, tmp_path, "--rate=40", "--requests=20", "--burstiness=0.5")["40/s"]
    assert summary["requests"] == 20 and summary["errors"] == 0
    assert summary["wall_s"] >= arrivals(20, 40, 0.5, seed=5)[-1]


def test_client_processes_share_the_work(service: Service, tmp_path: Path) -> None:
    first = len(service.engine.submits)
    summary = loads(service, tmp_path, "--clients=4", "--requests=9", "--processes=2")["4 clients"]
    assert summary["requests"] == 9 and len(set(sent(service, first))) == 9


def test_a_server_that_loads_is_waited_for(service: Service, tmp_path: Path) -> None:
    service.engine.phase = "loading"
    service.wait_until(lambda: not service.frontend.health().ok)
    timer = threading.Timer(0.5, setattr, (service.engine, "phase", "ready"))
    timer.start()
    summary = loads(service, tmp_path, "--clients=1", "--requests=1")["1 clients"]
    timer.join()
    assert summary["errors"] == 0


def test_more_clients_than_a_shell_allows_files(service: Service, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    few = [fd for fd in range(soft) if fd not in used][20]
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        summary = loads(service, tmp_path, "--clients=30", "--requests=30")["30 clients"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert summary["errors"] == 0


def test_an_interrupt_ends_the_client_processes_too(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("an answer that never comes {silent}")
    first = len(service.engine.submits)

    def interrupt() -> None:
        while len(service.engine.submits) < first + 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    flags = [f"--url={service.url}", f"--prompts={file}", "--clients=2", "--requests=2", "--processes=2"]
    assert main(["bench", "serve", *flags]) == 128 + signal.SIGINT
    thread.join()


def test_a_turn_brings_all_that_was_said(service: Service, tmp_path: Path) -> None:
    first = len(service.engine.submits)
    loads(service, tmp_path, "--clients=1", "--requests=1", "--turns=3", "--max-tokens=4")
    prompts = sent(service, first)
    assert len(prompts) == 3
    for before, after in zip(prompts, prompts[1:], strict=False):
        assert after.startswith(before + "okok")


def test_conversations_share_their_system_prompts(service: Service, tmp_path: Path) -> None:
    first = len(service.engine.submits)
    loads(service, tmp_path, "--clients=2", "--requests=6", "--prefixes=2", "--prefix-words=9")
    assert len({prompt.split("user")[0] for prompt in sent(service, first)}) == 2


def test_prompts_come_from_a_file(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    lines = ["plain text", json.dumps({"prompt": "a prompt", "max_tokens": 9}), json.dumps({"messages": messages})]
    file.write_text("\n".join(lines))
    first = len(service.engine.submits)
    loads(service, tmp_path, "--clients=1", "--requests=4", f"--prompts={file}")
    prompts = sent(service, first)
    assert all(
        words in prompt for words, prompt in zip(["plain", "a prompt", "be kind", "plain"], prompts, strict=True)
    )
    assert service.engine.submits[first + 1].sampling.max_tokens == 9


def test_refused_and_broken_requests_are_errors(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("{reject}\n{fail}\nfine\n")
    with pytest.raises(ConfigError):
        Workload(prompts=file).draw(1, seed=0)  # looks like JSON
    file.write_text(" {reject}\n {fail}\nfine\n")
    summary = loads(service, tmp_path, "--clients=1", "--requests=3", f"--prompts={file}", status=1)["1 clients"]
    assert summary["requests"] == 3 and summary["errors"] == 2 and summary["goodput_share"] == pytest.approx(1 / 3)
    printed = capsys.readouterr().out
    assert "status 429: the queue" in printed and "not finite" in printed


def test_figures_say_how_to_get_them_again_but_no_keys(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    flags = [*SMALL, f"--url={service.url}", "--clients=1", "--requests=1", f"--json={path}"]
    assert main(["bench", "serve", "--api-key", "hush", "--api-key=hush", *flags]) == 0
    assert "hush" not in path.read_text()
    found = json.loads(path.read_text())
    assert found["command"] == f"radixserve bench serve {' '.join(flags)}" and found["url"] == service.url


def test_an_answer_that_takes_too_long_is_an_error_that_says_so(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loads(service, tmp_path, "--clients=1", "--requests=1", "--timeout=1e-6", status=1)
    assert "no whole answer within 1e-06 s" in capsys.readouterr().out


def test_pictures_are_drawn(service: Service, tmp_path: Path) -> None:
    for clients in ("2", "1,2"):
        picture = tmp_path / f"{clients}.png"
        loads(service, tmp_path, f"--clients={clients}", "--requests=3", f"--plot={picture}")
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plot=curves.txt"], "must end in one of .png"),
        (["--prompts=/nowhere"], "cannot be read"),
        (["--url=http://127.0.0.1:9", "--model="], "is it running?"),
        (["--clients=2.5"], "--clients"),
        (["--clients=2", "--rate=3"], "--rate: not allowed with argument --clients"),
        (["--burstiness=0", "--rate=3"], "--burstiness: 0 is not above 0"),
        (["--prefixes=-1"], "--prefixes: -1 is not at least 0"),
        (["--prompts=/nowhere", "--turns=2"], "--turns does not go with --prompts"),
    ],
)
def test_mistakes_are_told(
    flags: list[str], message: str, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", f"--url={service.url}", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_matplotlib_is_told_before_the_load(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("radixserve.server.bench.report.find_spec", lambda name: None)
    first = len(service.engine.submits)
    assert main(["bench", "serve", f"--url={service.url}", "--plot=x.png"]) == 2
    assert "pip install 'radixserve[plot]'" in capsys.readouterr().err and len(service.engine.submits) == first


def test_arrivals_have_the_rate_and_burst_as_asked() -> None:
    def gaps(burstiness: float) -> Any:
        return np.diff(arrivals(5000, 10.0, burstiness, seed=1))

    for burstiness, spread in ((1.0, 1.0), (0.25, 2.0), (100.0, 0.1)):
        found = gaps(burstiness).tolist()
        assert statistics.fmean(found) == pytest.approx(0.1, rel=0.1)
        assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(spread, rel=0.1)


def test_chunks_are_told_apart_however_they_are_cut_and_spaced() -> None:
    stream = (
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
        b'data: {"choices":[{"delta":{"content":"a \\"content\\": \\"b"}}]}\r\n\r\n'
        b': keep-alive\n\ndata: {"choices": [{"delta": {"content": "c"}}]}\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 7, 50, len(stream)):
        answer = Answer()
        answer.status = 200
        for now, start in enumerate(range(0, len(stream), size)):
            answer.feed(float(now), stream[start : start + size])
        assert len(answer.times) == 2 and answer.text() == 'a "content": "bc'
        assert answer.usage() == {"prompt_tokens": 5, "completion_tokens": 2} and answer.error() is None


async def test_a_connection_that_was_closed_without_a_word_is_opened_again() -> None:
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        target = Target(f"http://{host}:{port}")
        connection = Connection(target, None)
        for _ in range(3):
            answer = Answer()
            await connection.post(target.request(b"{}"), answer)
            assert answer.status == 200
        connection.close()
    assert num_connections == 3
