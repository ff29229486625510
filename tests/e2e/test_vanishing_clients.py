"""Clients that go away, in every phase and in numbers: nothing is lost and nothing is held for them."""

import asyncio
import json
import random
import signal
import subprocess

import httpx

from radixserve.tests.e2e.server_process import RunningServer

LONG = {
    "prompt": "Once upon a time",
    "max_tokens": 4000,
    "ignore_eos": True,
    "temperature": 0,
}


def test_ctrl_c_in_mid_stream_frees_the_request(server: RunningServer) -> None:
    aborted = server.stats()["aborted"]
    body = json.dumps({**LONG, "stream": True})
    command = [
        "curl",
        "-sN",
        f"{server.url}/v1/completions",
        "-H",
        "content-type: application/json",
        "-d",
        body,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        assert curl.stdout.readline().startswith(b"data: ")
        curl.send_signal(signal.SIGINT)
    assert server.wait_idle()["aborted"] == aborted + 1


def test_client_of_a_plain_request_goes_away(server: RunningServer) -> None:
    aborted = server.stats()["aborted"]
    try:
        httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=1.0)
        raise AssertionError("4000 tokens within a second?")
    except httpx.ReadTimeout:
        pass
    assert server.wait_idle()["aborted"] == aborted + 1


def test_200_clients_that_vanish_at_random_leave_all_pages_free_or_cached(
    server: RunningServer,
) -> None:
    rng = random.Random(7)

    async def vanish(client: httpx.AsyncClient, delay_s: float, size: int, stream: bool) -> None:
        prompt = " ".join(str(rng.randrange(1000)) for _ in range(size))
        body = {
            "prompt": prompt,
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": stream,
        }
        try:
            async with asyncio.timeout(delay_s):
                await client.post(f"{server.url}/v1/completions", json=body)
        except TimeoutError:
            pass

    async def storm() -> None:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            await asyncio.gather(
                *(
                    vanish(
                        client,
                        rng.uniform(0.0, 1.5),
                        rng.randrange(3, 200),
                        rng.random() < 0.5,
                    )
                    for _ in range(200)
                )
            )

    asyncio.run(storm())
    stats = server.wait_idle(30)
    assert stats["kv_free_tokens"] + stats["kv_evictable_tokens"] == stats["kv_total_tokens"]
    assert server.health().status_code == 200
