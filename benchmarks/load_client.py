"""What the client of ``radixserve bench serve`` costs by itself, in CPU microseconds a chunk.

    python benchmarks/load_client.py [--clients 128] [--tokens 256] [--step-ms 10]

The server, a process of its own, writes one fixed frame to every open answer each step, as a real one does, so each
chunk is a read of its own for the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import socket
import time

import httptools
import uvloop

from radixserve.server.bench.load import ClosedLoop, Load, run_load
from radixserve.server.bench.report import Goal, summarize
from radixserve.server.bench.streaming import Target
from radixserve.server.bench.workload import Workload

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_BASE = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1764460800}


def frame(**facts: object) -> bytes:
    data = b"data: %s\n\n" % json.dumps(_BASE | {"model": "m"} | facts, separators=(",", ":")).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


_CHUNK = frame(choices=[{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}])


class Answering(asyncio.Protocol):
    """One connection of the server; ``left`` chunks of the open answer are still to be written."""

    def __init__(self, open_answers: set[Answering]) -> None:
        self._open = open_answers
        self.left = self.total = 0
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        wanted = re.search(rb'"max_tokens": ?(\d+)', body)
        if wanted:
            self.left = self.total = int(wanted[1])

    def on_message_complete(self) -> None:
        self.transport.write(_HEAD)
        self._open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)

    def step(self) -> None:
        self.left -= 1
        if self.left:
            self.transport.write(_CHUNK)
            return
        usage = frame(choices=[], usage={"prompt_tokens": 9, "completion_tokens": self.total})
        self.transport.write(_CHUNK + usage + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self._open.discard(self)


async def serve(listener: socket.socket, step_s: float) -> None:
    open_answers: set[Answering] = set()
    await asyncio.get_running_loop().create_server(lambda: Answering(open_answers), sock=listener)
    while True:
        began = time.perf_counter()
        for answer in list(open_answers):
            answer.step()
        await asyncio.sleep(max(0.0, began + step_s - time.perf_counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=10.0)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        context = multiprocessing.get_context("fork")
        server = context.Process(target=lambda: uvloop.run(serve(listener, options.step_ms / 1e3)), daemon=True)
        server.start()
        target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}")
        load = Load(target, "m", ClosedLoop(options.clients), processes=options.processes)
        conversations = Workload(max_tokens=(options.tokens, options.tokens)).draw(2 * options.clients, seed=0)
        found = summarize(run_load(load, conversations), Goal())
        server.kill()
    print(
        f"{options.clients} clients: {found['chunks_per_s']:,.0f} chunks/s; the client took "
        f"{found['client_us_per_chunk']:.1f} us of CPU a chunk and was busy {100 * found['client_busy_share']:.0f}% of "
        f"the time; {found['errors']:.0f} errors"
    )


if __name__ == "__main__":
    main()
