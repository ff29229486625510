"""Twice the load that the server has places for: nothing is lost, nothing is counted twice, nothing grows."""

import contextlib
import json
import os
import resource
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from radixserve.tests.e2e.server_process import RunningServer, running_server
from radixserve.tests.e2e.soak import SERVER_FLAGS, Account, Soak, counted
from radixserve.tests.server.byte_model import write_byte_model

NUM_IDLE = 10_000


def soak(folder: Path, seconds: float, kill_every_s: float) -> Account:
    with running_server("--model", str(write_byte_model(folder / "model")), *SERVER_FLAGS) as server:
        account = Soak(server).run(seconds, kill_every_s)
        check(server, account)
        return account


def check(server: RunningServer, account: Account) -> None:
    assert account.outcomes.total() == account.num_sent
    assert account.outcomes["finished"] and account.outcomes["refused"] and account.outcomes["aborted"]
    assert account.reasons["queue_full"]
    server.wait_ready()
    stats = server.wait_idle()
    assert stats["kv_free_tokens"] + stats["kv_evictable_tokens"] == stats["kv_total_tokens"]
    assert httpx.get(f"{server.url}/server_info").json()["open_requests"] == 0
    time.sleep(1.5)  # workers tell each other what they counted once a second
    ends = counted(server, httpx.get(f"{server.url}/metrics").text)
    assert ends["request_success"] >= account.num_choices
    assert ends["admission_rejections"] >= account.reasons["queue_full"]
    assert (ends["num_failed_requests"] > 0) == (account.outcomes["failed"] > 0)
    # A quiet engine checks its pages, and one that found an error would have been replaced.
    engine = server.engine_pid()
    assert server.log().count("starting it again") == account.num_kills
    assert account.samples[-1][1] == engine


def test_seconds_at_twice_the_capacity_with_a_killed_engine(tmp_path: Path) -> None:
    account = soak(tmp_path, seconds=8, kill_every_s=3)
    assert account.num_kills == 1


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_minutes_at_twice_the_capacity(tmp_path: Path) -> None:
    seconds = float(os.environ.get("SOAK_SECONDS", "900"))
    account = soak(tmp_path, seconds, kill_every_s=130)  # one that dies six times in ten minutes is given up
    engine_mib, workers_mib = account.flatness()
    print(f"\n{account.num_sent} requests in {seconds:g} s: {dict(account.outcomes)}, {dict(account.reasons)}")
    print(
        f"{account.num_kills} engines killed; memory grew by {engine_mib:.1f} MiB (engine), {workers_mib:.1f} (workers)"
    )
    (Path(os.environ.get("SOAK_SAMPLES", tmp_path / "samples.json"))).write_text(json.dumps(account.samples))
    # The tokenizer of a worker remembers its last 10,000 words: some 20 MiB.
    assert engine_mib < 20 and workers_mib < 60


@pytest.mark.soak
def test_ten_thousand_idle_connections(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NUM_IDLE + 1000:
        pytest.skip("the system allows fewer open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    model = str(write_byte_model(tmp_path / "model"))
    try:
        with running_server("--model", model, "--load-format=dummy", "--api-workers=1") as server:
            worker = psutil.Process(int(httpx.get(f"{server.url}/server_info").json()["worker_pid"]))
            files, rss = worker.num_fds(), worker.memory_info().rss
            with contextlib.ExitStack() as stack:
                host, port = server.url.removeprefix("http://").split(":")
                for _ in range(NUM_IDLE):
                    stack.enter_context(socket.create_connection((host, int(port))))
                answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 4}, timeout=20)
                assert answer.status_code == 200
                grown = worker.memory_info().rss - rss
                print(f"\n{worker.num_fds() - files} connections, {grown / NUM_IDLE / 1024:.1f} KiB each")
                assert grown < 20 * 1024 * NUM_IDLE
            deadline = time.monotonic() + 20
            while worker.num_fds() > files + 5:
                assert time.monotonic() < deadline, "descriptors are lost"
                time.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
