"""Load on a server: N clients in a closed loop, or conversations that begin at given times, whoever is still waiting.

The work is drawn before the clock starts and dealt to client processes, so that one Python client is not what is
measured. Tokens are counted by the server's usage, times by the client's clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import active_children, get_context
from pathlib import Path
from tempfile import NamedTemporaryFile

import uvloop

from radixserve.engine.host import raise_file_limit
from radixserve.engine.loading import shown_progress
from radixserve.server.bench.streaming import Answer, Connection, Target
from radixserve.server.bench.workload import Conversation, Message, arrivals

_START_TIMEOUT_S = 60.0
_LOOK_S = 0.5


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
    raise_file_limit()
    pace = load.pace
    processes = min(load.processes, len(conversations))
    if isinstance(pace, ClosedLoop):
        processes = min(processes, pace.clients)
        times = [0.0] * len(conversations)
    else:
        times = arrivals(len(conversations), pace.rate, pace.burstiness, load.seed)
    clients = [_Client(load, conversations[i::processes], times[i::processes], i, processes) for i in range(processes)]
    if processes == 1:
        return [clients[0].run()]
    context = get_context("spawn")  # who runs this may have threads
    ready = context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, initializer=ready.wait, initargs=(_START_TIMEOUT_S,)) as pool:
        try:
            return list(pool.map(_Client.run, clients))
        except BaseException:  # an interrupt, mostly: they would go on to the end of the load
            for process in active_children():
                process.terminate()
            raise


@contextmanager
def shown_count(what: str, total: int) -> Iterator[Path]:
    """A file for ``Load.ended``, whose size is told on standard error within the scope, as a bar or lines: processes of
    their own make the load, so a thread looks at it now and then."""
    ended = threading.Event()
    with NamedTemporaryFile() as file, shown_progress(lambda line: print(line, file=sys.stderr, flush=True)) as show:
        path = Path(file.name)

        def look() -> None:
            count = path.stat().st_size
            show(f"{what}: {count} of {total} conversations", count / total)

        def watch() -> None:
            while not ended.wait(_LOOK_S):
                look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield path
        finally:
            ended.set()
            thread.join()
        look()


@dataclass
class _Client:
    """Client process ``index`` of ``processes`` with its part of the work; ``times``: when each conversation begins.
    Owns its connections."""

    load: Load
    conversations: Sequence[Conversation]
    times: Sequence[float]
    index: int
    processes: int

    def run(self) -> ClientRun:
        began, cpu_began = time.perf_counter(), time.process_time()
        self._tls = self.load.target.tls()
        self._idle: list[Connection] = []
        self._samples: list[Sample] = []
        with self.load.ended.open("ab", buffering=0) as self._ended:
            uvloop.run(self._run())
        return ClientRun(self._samples, began, time.perf_counter(), time.process_time() - cpu_began)

    async def _run(self) -> None:
        match self.load.pace:
            case ClosedLoop(clients):
                queue = iter(self.conversations)
                await asyncio.gather(*(self._one_by_one(queue) for _ in range(self.index, clients, self.processes)))
            case OpenLoop():
                await self._on_time()
        for connection in self._idle:
            connection.close()

    async def _one_by_one(self, queue: Iterator[Conversation]) -> None:
        for conversation in queue:
            await self._hold(conversation)

    async def _on_time(self) -> None:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for conversation, begins in zip(self.conversations, self.times, strict=True):
                await asyncio.sleep(start + begins - time.perf_counter())
                group.create_task(self._hold(conversation))

    async def _hold(self, conversation: Conversation) -> None:
        """One conversation; a turn that fails ends it."""
        connection = self._idle.pop() if self._idle else Connection(self.load.target, self._tls)
        messages = list(conversation.opening)
        for text, max_tokens in zip(conversation.turns, conversation.max_tokens, strict=True):
            messages.append({"role": "user", "content": text})
            answer = Answer()
            sample = await self._ask(connection, self.load.body(messages, max_tokens), answer)
            self._samples.append(sample)
            if sample.error is not None:
                break
            if len(conversation.turns) > 1:
                messages.append({"role": "assistant", "content": answer.text()})
        self._idle.append(connection)
        self._ended.write(b".")

    async def _ask(self, connection: Connection, body: bytes, answer: Answer) -> Sample:
        request = self.load.target.request(body)
        sample = Sample()
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self.load.timeout_s):
                await connection.post(request, answer)
            sample.error = answer.error()
        except TimeoutError:
            sample.error = f"no whole answer within {self.load.timeout_s:g} s"
        except OSError as error:
            sample.error = repr(error)
        sample.total_s = time.perf_counter() - start
        times = answer.times
        if times:
            sample.ttft_s = times[0] - start
            sample.gaps_s = array("d", (after - before for before, after in pairwise(times)))
        usage = answer.usage() if sample.error is None else {}
        sample.prompt_tokens = usage.get("prompt_tokens") or 0
        sample.completion_tokens = usage.get("completion_tokens") or len(times)
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return sample
