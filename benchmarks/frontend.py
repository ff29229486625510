"""What one frontend process can do: streamed tokens and whole requests a second, with an engine that costs nothing.

    python benchmarks/frontend.py [--clients 256] [--tokens 256] [--requests 512] [--profile FILE]

Three processes: the real worker on one core, and a fake engine and the clients on the others. The engine answers each
step's tokens of all requests in one message, as the real one does, and as fast as it can. Clients read raw sockets and
count frames. The worker's own CPU time is reported beside the wall time, for machines that have other things to do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import zmq

from radixserve.configs.schema import ServeConfig
from radixserve.engine import lifeline
from radixserve.engine.messages import (
    Abort,
    EngineStatus,
    FinishReason,
    Outputs,
    Submit,
    ToEngine,
    TokenEvent,
)

# Ids of ordinary words in the default model's vocabulary.
WORDS = list(range(1000, 5000))
STATUS_INTERVAL_S = 0.5


def run_engine(address: str, step_ms: float) -> None:
    """One token a step for every open request, until its ``max_tokens``."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.RCVHWM, 0)
    router.bind(address)
    decoder, encoder = msgspec.msgpack.Decoder(ToEngine), msgspec.msgpack.Encoder()
    left: dict[bytes, dict[int, int]] = {}
    started: set[int] = set()
    next_status, step = 0.0, 0
    status = EngineStatus(os.getpid(), "ready", max_model_len=8192, vocab_size=49152)
    while True:
        idle = not any(left.values())
        router.poll(20 if idle else 0)
        while router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            frontend, data = router.recv_multipart()
            requests = left.setdefault(frontend, {})
            message = decoder.decode(data)
            if isinstance(message, Submit):
                requests[message.uid] = message.sampling.max_tokens or 1
            elif isinstance(message, Abort):
                requests.pop(message.uid, None)
        step += 1
        for frontend, requests in left.items():
            if requests:
                router.send_multipart([frontend, encoder.encode(_step(requests, started, step))])
            left[frontend] = {uid: count - 1 for uid, count in requests.items() if count > 1}
        if time.monotonic() > next_status:
            next_status = time.monotonic() + STATUS_INTERVAL_S
            for frontend in left:
                router.send_multipart([frontend, encoder.encode(status)])
        if step_ms and not idle:
            time.sleep(step_ms / 1000)


def _step(left: dict[int, int], started: set[int], step: int) -> Outputs:
    """``left``: how many tokens each request still gets, the one of this step included."""
    outputs = Outputs([], [], [])
    for uid, count in left.items():
        token = WORDS[(uid * 31 + step) % len(WORDS)]
        if count == 1 or uid not in started:
            started.add(uid)
            finish = FinishReason.LENGTH if count == 1 else None
            outputs.events.append(TokenEvent(uid, [token], finish))
        else:
            outputs.uids.append(uid)
            outputs.tokens.append(token)
    return outputs


@dataclass
class Load:
    """``frames``: chunks with text; ``largest_gap_s`` between two reads of one stream."""

    seconds: float
    frames: int
    requests: int


def run_clients(address: tuple[str, int], num_clients: int, num_requests: int, body: dict[str, object]) -> Load:
    """A closed loop of ``num_clients`` keep-alive connections until ``num_requests`` are answered."""
    content = json.dumps(body).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)
    end = b"0\r\n\r\n" if body["stream"] else b"}}}"
    selector = selectors.DefaultSelector()
    waiting = deque(range(num_requests))
    frames = answered = 0
    tails: dict[socket.socket, bytes] = {}

    def send_next(client: socket.socket) -> None:
        if waiting:
            waiting.popleft()
            tails[client] = b""
            client.sendall(request)

    clients = [socket.create_connection(address) for _ in range(min(num_clients, num_requests))]
    began = time.monotonic()
    for client in clients:
        selector.register(client, selectors.EVENT_READ)
        send_next(client)
    while answered < num_requests:
        for key, _ in selector.select():
            client = key.fileobj
            assert isinstance(client, socket.socket)
            data = client.recv(1 << 16)
            if not data:
                raise SystemExit("the server closed a connection")
            frames += data.count(b'"delta":{"content":')
            tails[client] = (tails[client] + data)[-len(end) :]
            if tails[client] == end:
                answered += 1
                send_next(client)
    return Load(time.monotonic() - began, frames, num_requests)


def start_worker(folder: Path, listener: socket.socket, profile: str | None) -> subprocess.Popen[bytes]:
    fd = listener.fileno()
    profiling = ["-m", "cProfile", "-o", profile] if profile else []
    environment = {lifeline.IPC_VARIABLE: f"ipc://{folder}/engine", lifeline.LISTEN_FD_VARIABLE: str(fd)}
    worker = subprocess.Popen(
        [sys.executable, *profiling, "-m", "radixserve.server.worker"],
        stdin=subprocess.PIPE,
        pass_fds=(fd,),
        env={**os.environ, **environment},
    )
    tell(worker, ServeConfig().to_private_json())
    return worker


def tell(worker: subprocess.Popen[bytes], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{line}\n".encode())
    worker.stdin.flush()


def wait_ready(address: tuple[str, int]) -> None:
    while True:
        with socket.create_connection(address) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            if b" 200 " in probe.recv(1 << 12):
                return
        time.sleep(0.1)


def measure(
    worker: psutil.Process, address: tuple[str, int], clients: int, requests: int, body: dict[str, object]
) -> None:
    before = sum(worker.cpu_times()[:2])
    load = run_clients(address, clients, requests, body)
    cpu_s = sum(worker.cpu_times()[:2]) - before
    tokens = requests * int(str(body["max_tokens"]))
    kind = "streaming" if body["stream"] else "whole"
    print(
        f"{kind}: {clients} clients, {requests} requests of {body['max_tokens']} tokens in {load.seconds:.2f} s: "
        f"{tokens / load.seconds:,.0f} tokens/s, {requests / load.seconds:,.0f} requests/s; "
        f"worker CPU {cpu_s:.2f} s: {tokens / cpu_s:,.0f} tokens and {requests / cpu_s:,.0f} requests a CPU second"
        + (f"; {load.frames / tokens:.2f} chunks a token" if load.frames else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=0.0, help="pause of the engine after each step")
    parser.add_argument("--profile", help="write a cProfile of the worker here (slows it down)")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        folder, address = Path(name), listener.getsockname()
        worker = start_worker(folder, listener, options.profile)
        os.sched_setaffinity(worker.pid, cores[:1])
        os.sched_setaffinity(0, cores[1:] or cores)
        engine = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(f"ipc://{folder}/engine", options.step_ms), daemon=True
        )
        engine.start()
        wait_ready(address)
        process = psutil.Process(worker.pid)
        body: dict[str, object] = {"messages": [{"role": "user", "content": "word " * 100}], "ignore_eos": True}
        for stream, tokens in ((True, options.tokens), (False, options.tokens), (False, 1)):
            body |= {"stream": stream, "max_tokens": tokens}
            run_clients(address, options.clients, options.clients, body)  # warm-up
            measure(process, address, options.clients, options.requests, body)
        tell(worker, "drain 1")
        worker.wait(10)
        engine.kill()


if __name__ == "__main__":
    main()
