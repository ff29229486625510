"""What the frontend processes can do: streamed tokens and whole requests a second, with an engine that costs nothing.

    python benchmarks/frontend.py [--clients 256] [--tokens 256] [--requests 512] [--api-workers 1] [--output FILE]

The real workers, the first ones with a core each, and a fake engine and the clients on the other cores. The engine
answers each step's tokens of all requests in one message a worker, as the real one does, every ``--step-ms`` (0: as
fast as it can, so that most messages have one token). Clients read raw sockets and count frames. What says most is the
CPU time of the workers for each token: the machine may have other things to do, and two versions are best run in turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

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
from radixserve.server.listening import listen_side_by_side

# Ids of ordinary words in the default model's vocabulary.
WORDS = list(range(1000, 5000))
STATUS_INTERVAL_S = 0.5


class Body(TypedDict):
    messages: list[dict[str, str]]
    ignore_eos: bool
    stream: bool
    max_tokens: int


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
    """``frames``: chunks with text."""

    seconds: float
    frames: int


@dataclass
class Figures:
    """Of one kind of load. ``cpu_us``: of all workers, for each token, and of that in the kernel."""

    kind: str
    tokens_per_s: float
    requests_per_s: float
    cpu_us_per_token: float
    kernel_us_per_token: float
    cpu_ms_per_request: float
    frames_per_token: float


def run_clients(address: tuple[str, int], num_clients: int, num_requests: int, body: Body) -> Load:
    """A closed loop of ``num_clients`` keep-alive connections until ``num_requests`` are answered."""
    content = json.dumps(body).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)
    end = b"0\r\n\r\n" if body["stream"] else b"}}}"
    selector = selectors.DefaultSelector()
    waiting = deque(range(num_requests))
    frames = answered = 0
    tails: dict[socket.socket, bytes] = {}

    def send_next(client: socket.socket) -> None:
        if not waiting:
            selector.unregister(client)
            client.close()  # an idle one would be closed by the server after a while
            return
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
    return Load(time.monotonic() - began, frames)


def start_worker(folder: Path, listener: socket.socket, profile: Path | None) -> subprocess.Popen[bytes]:
    fd = listener.fileno()
    profiling = ["-m", "cProfile", "-o", str(profile)] if profile else []
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


def wait_ready(address: tuple[str, int], num_workers: int) -> None:
    """Each connection meets any one of the workers, so many in a row are likely to have met all."""
    ready = 0
    while ready < 8 * num_workers:
        with socket.create_connection(address) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            ready = ready + 1 if b" 200 " in probe.recv(1 << 12) else 0
        time.sleep(0 if ready else 0.1)


def measure(
    workers: list[psutil.Process], address: tuple[str, int], clients: int, requests: int, body: Body
) -> Figures:
    before = [worker.cpu_times() for worker in workers]
    load = run_clients(address, clients, requests, body)
    after = [worker.cpu_times() for worker in workers]
    user_s = sum(end.user - start.user for start, end in zip(before, after, strict=True))
    kernel_s = sum(end.system - start.system for start, end in zip(before, after, strict=True))
    tokens = requests * body["max_tokens"]
    return Figures(
        f"{'streamed' if body['stream'] else 'whole'}, {body['max_tokens']} tokens each",
        tokens_per_s=round(tokens / load.seconds),
        requests_per_s=round(requests / load.seconds),
        cpu_us_per_token=round(1e6 * (user_s + kernel_s) / tokens, 1),
        kernel_us_per_token=round(1e6 * kernel_s / tokens, 1),
        cpu_ms_per_request=round(1e3 * (user_s + kernel_s) / requests, 2),
        frames_per_token=round(load.frames / tokens, 2),
    )


def report(options: argparse.Namespace, rows: list[Figures]) -> None:
    for row in rows:
        print("; ".join(f"{name}: {value}" for name, value in asdict(row).items()))
    if options.output:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        facts = {"commit": commit, "command": " ".join(sys.argv), "cores": os.cpu_count()}
        options.output.write_text(json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--api-workers", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=8.0, help="pause of the engine after each step")
    parser.add_argument("--profile", type=Path, help="write a cProfile of the first worker here (slows it down)")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    cores = sorted(os.sched_getaffinity(0))
    num_workers: int = options.api_workers
    with tempfile.TemporaryDirectory() as name, ExitStack() as sockets:
        listeners = [sockets.enter_context(one) for one in listen_side_by_side("127.0.0.1", 0, num_workers)]
        folder, address = Path(name), listeners[0].getsockname()
        workers = [
            start_worker(folder, listener, None if index else options.profile)
            for index, listener in enumerate(listeners)
        ]
        if num_workers < len(cores):
            for worker, core in zip(workers, cores, strict=False):
                os.sched_setaffinity(worker.pid, [core])
            os.sched_setaffinity(0, cores[num_workers:])
        engine = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(f"ipc://{folder}/engine", options.step_ms), daemon=True
        )
        engine.start()
        wait_ready(address, num_workers)
        processes = [psutil.Process(worker.pid) for worker in workers]
        rows = []
        for stream, tokens in ((True, options.tokens), (False, options.tokens), (False, 1)):
            messages = [{"role": "user", "content": "word " * 100}]
            body = Body(messages=messages, ignore_eos=True, stream=stream, max_tokens=tokens)
            run_clients(address, options.clients, options.clients, body)  # warm-up
            rows.append(measure(processes, address, options.clients, options.requests, body))
        report(options, rows)
        for worker in workers:
            tell(worker, "drain 1")
        for worker in workers:
            worker.wait(10)
        engine.kill()


if __name__ == "__main__":
    main()
