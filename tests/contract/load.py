"""Clients in numbers, and clients that leave."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from typing import Any

import httpx
import msgspec

from radixserve.tests.contract.api import COMPLETIONS, Api


class Leaver:
    """One request on a bare socket, so that the test decides how it ends: ``fin``, ``rst`` or ``half`` (only the
    sending side is closed, the client still reads)."""

    def __init__(self, api: Api, path: str, body: dict[str, Any], key: str = ""):
        host, port = api.server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        data = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nx-api-key: {key}\r\n"
        self._socket.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def leave(self, how: str = "fin") -> None:
        if how == "half":
            self._socket.shutdown(socket.SHUT_WR)
            return
        if how == "rst":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._socket.close()


class Reader(threading.Thread):
    """Reads a stream to its end and notes when each line came."""

    def __init__(self, api: Api, body: dict[str, Any], path: str = COMPLETIONS):
        super().__init__(daemon=True)
        self._url, self._body = api.server.url + path, {**body, "stream": True}
        self.times: list[float] = []
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    self.times.append(time.monotonic())
                    self.lines.append(line.removeprefix("data: "))

    def wait_for(self, num_lines: int, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.lines) < num_lines:
            assert time.monotonic() < deadline and self.is_alive(), f"{len(self.lines)} lines only"
            time.sleep(0.01)

    def text(self) -> str:
        """Waits for the end, which must be a good one."""
        self.join(120)
        assert self.lines and self.lines[-1] == "[DONE]", self.lines[-1:]
        chunks = [msgspec.json.decode(line) for line in self.lines[:-1]]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def storm(api: Api, num_clients: int, at_once: int, seed: int) -> None:
    """Clients that vanish at random times, some before the headers, some as they finish."""
    rng = random.Random(seed)
    gate = threading.Semaphore(at_once)

    def vanish(size: int, delay_s: float, how: str, stream: bool, max_tokens: int) -> None:
        prompt = [[rng.randrange(100, 40000) for _ in range(size)]]
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
        with gate:
            leaver = Leaver(api, COMPLETIONS, body)
            time.sleep(delay_s)
            leaver.leave(how)

    def client() -> threading.Thread:
        delay_s = rng.choice((0.0, rng.uniform(0, 1.5)))
        arguments = (rng.randrange(10, 200), delay_s, rng.choice(("fin", "rst")), rng.random() < 0.7)
        return threading.Thread(target=vanish, args=(*arguments, rng.choice((5, 2000))))

    clients = [client() for _ in range(num_clients)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
