"""Load that never lets up, from clients of all kinds, with engines that are killed; every request is accounted for.

The clients are twice as many as the server has seats and places in its queue. Each sends one request after the other:
prompts with shared beginnings, stop strings, several choices, streams or not, and some leave before the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from radixserve.tests.e2e.server_process import RunningServer

SEATS, QUEUE = 8, 8
NUM_CLIENTS = 2 * (SEATS + QUEUE)
# 1,600 tokens of KV for 8 requests of up to 500: retraction is part of the load.
SERVER_FLAGS = (
    "--load-format=dummy",
    # In bf16 oneDNN keeps code for each new shape, up to a limit that minutes do not reach: see docs/reliability.md.
    "--dtype=float32",
    f"--max-num-seqs={SEATS}",
    f"--max-num-queued-reqs={QUEUE}",
    "--num-pages=100",
    "--page-size=16",
    "--api-workers=2",
    "--log-level=error",
)
PATIENCE_S = 60.0
_SYSTEM_PROMPTS = ["You are a helpful assistant. " * 6, "Answer tersely. " * 12, "Write verse. " * 9]


@dataclass
class Account:
    """What became of each request, and resident memory in MiB by process role, a sample every second."""

    num_sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    num_choices: int = 0  # of finished requests
    num_kills: int = 0
    samples: list[tuple[float, int, float, float]] = field(default_factory=list)  # time, engine pid, engine, workers

    def flatness(self) -> tuple[float, float]:
        """Growth of engine and workers in MiB: the median of the last fifth less that of the second fifth, among the
        samples of the last engine."""
        last = [sample for sample in self.samples if sample[1] == self.samples[-1][1]]
        fifth = max(1, len(last) // 5)
        early, late = last[fifth : 2 * fifth] or last, last[-fifth:]
        growth = [statistics.median(s[i] for s in late) - statistics.median(s[i] for s in early) for i in (2, 3)]
        return growth[0], growth[1]


class Soak:
    """One run against ``server``. The engine is killed every ``kill_every_s`` in the first half of it."""

    def __init__(self, server: RunningServer, seed: int = 0) -> None:
        self.account = Account()
        self._server = server
        self._rng = random.Random(seed)
        host, port = server.url.removeprefix("http://").split(":")
        self._address = host, int(port)

    def run(self, seconds: float, kill_every_s: float) -> Account:
        asyncio.run(self._run(seconds, kill_every_s))
        return self.account

    async def _run(self, seconds: float, kill_every_s: float) -> None:
        end = time.monotonic() + seconds
        kills = asyncio.create_task(self._kill(end - seconds / 2, kill_every_s))
        samples = asyncio.create_task(self._sample())
        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(self._client(end))
        samples.cancel()
        await kills

    async def _client(self, end: float) -> None:
        while time.monotonic() < end:
            body = self._body()
            leaves_after_s = self._rng.choice((None, None, None, self._rng.uniform(0, 1)))
            self.account.num_sent += 1
            try:
                async with asyncio.timeout(PATIENCE_S if leaves_after_s is None else leaves_after_s):
                    outcome = self._judge(body, await self._ask(body))
            except TimeoutError:
                assert leaves_after_s is not None, f"no end after {PATIENCE_S} s: {body}"
                outcome = "aborted"
            self.account.outcomes[outcome] += 1
            if outcome != "finished":
                await asyncio.sleep(self._rng.uniform(0, 0.3))

    def _body(self) -> dict[str, object]:
        rng = self._rng
        tail = "".join(chr(rng.randrange(97, 123)) for _ in range(rng.randrange(1, 120)))
        return {
            "prompt": rng.choice(_SYSTEM_PROMPTS) + tail,
            "max_tokens": rng.choice((1, 20, 60, 250)),
            "ignore_eos": rng.random() < 0.8,
            "stream": rng.random() < 0.6,
            "n": rng.choice((1, 1, 1, 2)),
            "stop": rng.choice(([], [], ["qx"], ["e", "\x00z"])),
            "temperature": rng.choice((0, 1)),
        }

    async def _ask(self, body: dict[str, object]) -> bytes:
        """The whole answer; the connection is closed however this ends."""
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-length: {len(data)}"
            writer.write(head.encode() + b"\r\n\r\n" + data)
            return await reader.read(-1)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _judge(self, body: dict[str, object], answer: bytes) -> str:
        """finished, refused or failed; an AssertionError for what is none of these."""
        head, _, rest = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status != 200:
            code = json.loads(rest)["error"]["code"]
            self.account.reasons[code] += 1
            assert status in (429, 500, 503), answer
            return "failed" if code in ("engine_dead", "generation_failed") else "refused"
        if not body["stream"]:
            reasons = [choice["finish_reason"] for choice in json.loads(rest)["choices"]]
        else:
            events = [line.removeprefix(b"data: ") for line in rest.split(b"\n") if line.startswith(b"data: ")]
            if events[-1] != b"[DONE]":
                self.account.reasons[json.loads(events[-1])["error"]["code"]] += 1
                return "failed"
            choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
            reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert len(reasons) == body["n"] and set(reasons) <= {"stop", "length"}, answer
        self.account.num_choices += len(reasons)
        return "finished"

    async def _kill(self, until: float, every_s: float) -> None:
        """Kill the engine now and then, and wait until the next one serves."""
        while time.monotonic() + every_s < until:
            await asyncio.sleep(every_s)
            os.kill(await asyncio.to_thread(self._server.engine_pid), signal.SIGKILL)
            self.account.num_kills += 1
            await asyncio.sleep(0.5)
            await asyncio.to_thread(self._server.wait_ready)

    async def _sample(self) -> None:
        began = time.monotonic()
        while True:
            engine, workers = 0, 0.0
            sizes = dict(_sizes(self._server))
            for pid, (is_engine, mib) in sizes.items():
                engine = pid if is_engine else engine
                workers += 0 if is_engine else mib
            if engine:
                self.account.samples.append((time.monotonic() - began, engine, sizes[engine][1], workers))
            await asyncio.sleep(1)


def _sizes(server: RunningServer) -> dict[int, tuple[bool, float]]:
    """Of each child: whether it is the engine, and its resident memory in MiB."""
    sizes = {}
    for pid in server.children():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            is_engine = b"radixserve.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
            sizes[pid] = is_engine, psutil.Process(pid).memory_info().rss / 2**20
    return sizes


def counted(server: RunningServer, metrics: str) -> Counter[str]:
    """The server's own counters of ended requests, from the text of /metrics, labels added up."""
    found: Counter[str] = Counter()
    for line in metrics.splitlines():
        name, _, value = line.partition("{")
        if name.startswith("radixserve:") and name.endswith("_total"):
            found[name.removeprefix("radixserve:").removesuffix("_total")] += int(float(value.rpartition(" ")[2]))
    return found
