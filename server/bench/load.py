"""Load on a server: N clients in a closed loop, or conversations that begin at given times, whoever is still waiting.

The work is drawn before the clock starts and dealt to client processes, so that one Python client is not what is
measured. Tokens are counted by the server's usage, times by the client's clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import active_children, get_context
from pathlib import Path

import uvloop

from radixserve.server.bench.streaming import Answer, Connection, Target
from radixserve.server.bench.workload import Conversation, Message, arrivals

_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, each sending its next request when the last one is answered."""

    clients: int

    def __str__(self) -> str:
        return f"{self.clients} clients"


@dataclass(frozen=True)
class OpenLoop:
    """Conversations begin at ``rate`` a second, however many are open; ``burstiness``: see ``workload.arrivals``."""

    rate: float
    burstiness: float = 1.0

    def __str__(self) -> str:
        return f"{self.rate:g}/s"


Pace = ClosedLoop | OpenLoop


@dataclass(frozen=True)
class Load:
    """How to send a workload. ``timeout_s``: longest time for one answer."""

    target: Target
    model: str
    pace: Pace
    processes: int = 1
    ignore_eos: bool = True
    timeout_s: float = 600.0
    seed: int = 0
    ended: Path = Path(os.devnull)  # gets a byte for each conversation that has ended

    def body(self, messages: list[Message], max_tokens: int) -> bytes:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body | {"ignore_eos": True} if self.ignore_eos else body).encode()


@dataclass
class Sample:
    """What one request saw. Times in seconds; ``gaps_s`` between chunks with text."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    @property
    def itl_s(self) -> float:
        """Mean time of each token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.completion_tokens - 1)


@dataclass
class ClientRun:
    """What one client process saw; ``began`` and ``ended`` by the machine's monotonic clock, all in seconds."""

    samples: list[Sample]
    began: float
    ended: float
    cpu_s: float


def run_load(load: Load, conversations: Sequence[Conversation]) -> list[ClientRun]:
    """Hold all ``conversations`` and wait for them; errors of single requests are samples, not exceptions."""
    pace = load.pace
    processes = min(load.processes, len(conversations))
    if isinstance(pace, ClosedLoop):
        processes = min(processes, pace.clients)
        times = [0.0] * len(conversations)
    else:
        times = arrivals(len(conversations), pace.rate, pace.burstiness, load.seed)
    shares = [_Share(load, conversations[i::processes], times[i::processes], i, processes) for i in range(processes)]
    if processes == 1:
        return [_run_client(shares[0])]
    context = get_context("spawn")  # who runs this may have threads
    ready = context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, initializer=ready.wait, initargs=(_START_TIMEOUT_S,)) as pool:
        try:
            return list(pool.map(_run_client, shares))
        except BaseException:  # an interrupt, mostly: they would go on to the end of the load
            for process in active_children():
                process.terminate()
            raise


@dataclass(frozen=True)
class _Share:
    """The part of client process ``index`` of ``processes``; ``times``: when each conversation begins."""

    load: Load
    conversations: Sequence[Conversation]
    times: Sequence[float]
    index: int
    processes: int


def _run_client(share: _Share) -> ClientRun:
    began, cpu_began = time.perf_counter(), time.process_time()
    samples: list[Sample] = uvloop.run(_Client(share.load).run(share))
    return ClientRun(samples, began, time.perf_counter(), time.process_time() - cpu_began)


class _Client:
    """One client process at work. Owns its connections."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tls = load.target.tls()
        self._idle: list[Connection] = []
        self._samples: list[Sample] = []
        self._ended = load.ended.open("ab", buffering=0)

    async def run(self, share: _Share) -> list[Sample]:
        match self._load.pace:
            case ClosedLoop(clients):
                queue = iter(share.conversations)
                await asyncio.gather(*(self._one_by_one(queue) for _ in range(share.index, clients, share.processes)))
            case OpenLoop():
                await self._on_time(share)
        for connection in self._idle:
            connection.close()
        self._ended.close()
        return self._samples

    async def _one_by_one(self, queue: Iterator[Conversation]) -> None:
        for conversation in queue:
            await self._hold(conversation)

    async def _on_time(self, share: _Share) -> None:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for conversation, begins in zip(share.conversations, share.times, strict=True):
                await asyncio.sleep(start + begins - time.perf_counter())
                group.create_task(self._hold(conversation))

    async def _hold(self, conversation: Conversation) -> None:
        """One conversation; a turn that fails ends it."""
        connection = self._idle.pop() if self._idle else Connection(self._load.target, self._tls)
        messages = list(conversation.opening)
        for text, max_tokens in zip(conversation.turns, conversation.max_tokens, strict=True):
            messages.append({"role": "user", "content": text})
            answer = Answer()
            sample = await self._ask(connection, self._load.body(messages, max_tokens), answer)
            self._samples.append(sample)
            if sample.error is not None:
                break
            if len(conversation.turns) > 1:
                messages.append({"role": "assistant", "content": answer.text()})
        self._idle.append(connection)
        self._ended.write(b".")

    async def _ask(self, connection: Connection, body: bytes, answer: Answer) -> Sample:
        request = self._load.target.request(body)
        sample = Sample()
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._load.timeout_s):
                await connection.post(request, answer)
            sample.error = answer.error()
        except TimeoutError:
            sample.error = f"no whole answer within {self._load.timeout_s:g} s"
        except OSError as error:
            sample.error = repr(error)
        sample.total_s = time.perf_counter() - start
        _fill(sample, answer, start)
        return sample


def _fill(sample: Sample, answer: Answer, start: float) -> None:
    """Times and counts of a finished answer."""
    times = answer.times
    if times:
        sample.ttft_s = times[0] - start
        sample.gaps_s = array("d", (after - before for before, after in pairwise(times)))
    usage = answer.usage() if sample.error is None else {}
    sample.prompt_tokens = _count(usage.get("prompt_tokens"))
    sample.completion_tokens = _count(usage.get("completion_tokens")) or len(times)
    details = usage.get("prompt_tokens_details")
    sample.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
