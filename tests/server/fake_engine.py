"""An engine without a model, that speaks the messages of the real one: what it answers stands in the prompt.

``<<text>>`` in a prompt is the answer, one byte a token, then end-of-sequence; ``ok`` without that. More words there:
``{fail}`` (an error after three tokens), ``{reject}`` (never admitted, 429),
``{badgrammar}`` (a grammar that cannot be compiled), ``{silent}`` (accepted, no token ever),
``{slow}`` (a token every 20 ms instead of at once). A prompt seen before in its namespace counts as cached but for its
last token. Token ids below 256 are bytes, 256 is end-of-sequence.

Runs as a thread (``running_engine``), or as a process: ``python fake_engine.py ADDRESS``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from radixserve.engine.messages import (
    Abort,
    AbortRequest,
    CacheFlushed,
    EngineStats,
    EngineStatus,
    FinishReason,
    FlushCache,
    Hello,
    Observation,
    Outputs,
    Ping,
    Rejected,
    Submit,
    ToEngine,
    TokenEvent,
    TokenLogprobs,
    Watch,
)
from radixserve.engine.observation import EngineView, SeenStep
from radixserve.kvcache.watch import SeenNode, TreeEvent

EOS = 256
VOCAB_SIZE = 262
MAX_MODEL_LEN = 512
# Answers to ask it for.
TWO_CALLS = (
    'I call.\n<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nLet me see.\n</think>\n\nYes."
TREE_TEXT = "a <b>secret</b>"  # of the one segment that watchers are shown
Key = tuple[bytes, int]


@dataclass
class Running:
    submit: Submit
    prompt: bytes
    answer: bytes
    cached_tokens: int
    output: list[int] = field(default_factory=list)

    def says(self, word: str) -> bool:
        return b"{" + word.encode() + b"}" in self.prompt


class FakeEngine:
    """``submits``, ``aborted`` and ``watches`` are what came in, in order; read them from any thread."""

    def __init__(self, address: str, phase: str = "ready"):
        self.phase = phase
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.watches: list[Watch] = []
        self.running: dict[Key, Running] = {}
        self._address = address
        self._frontends: set[bytes] = set()
        self._seen: set[tuple[str, bytes]] = set()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._stop = threading.Event()
        self._frozen = threading.Event()
        self._damages: set[bytes] = set()

    def stop(self) -> None:
        self._stop.set()

    def freeze(self, frozen: bool) -> None:
        """Neither read nor write anything, as a stuck engine."""
        (self._frozen.set if frozen else self._frozen.clear)()

    def damage_next(self) -> None:
        """What it sends next to each frontend cannot be read."""
        self._damages = {*self._frontends}

    def run(self) -> None:
        context = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self._address)
        next_status = 0.0
        while not self._stop.is_set():
            if self._frozen.is_set():
                time.sleep(0.01)
                continue
            self._socket.poll(1 if self._busy() else 20)
            self._receive()
            self._step()
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + 0.2
                for frontend in self._frontends:
                    self._send(frontend, self._status())
        self._socket.close()
        context.term()

    def _busy(self) -> bool:
        return any(not request.says("silent") for request in self.running.values())

    def _receive(self) -> None:
        while True:
            try:
                frontend, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frontend, self._decoder.decode(data))

    def _take(self, frontend: bytes, message: ToEngine) -> None:
        match message:
            case Hello() | Ping():
                self._frontends.add(frontend)
                self._send(frontend, self._status())
            case Submit():
                self._submit(frontend, message)
            case Abort():
                self._abort([(frontend, message.uid)])
            case AbortRequest():
                wanted = message.request_id
                self._abort([k for k, r in self.running.items() if wanted in ("", r.submit.request_id)])
            case FlushCache():
                self._send(frontend, CacheFlushed(message.call, len(self._seen)))
                self._seen.clear()
            case Watch():
                self.watches.append(message)
                self._send(frontend, Observation(EngineStats(), _view()))

    def _submit(self, frontend: bytes, submit: Submit) -> None:
        self.submits.append(submit)
        prompt = bytes(i if i < 256 else 0 for i in np.frombuffer(submit.prompt_ids, np.int32))
        said = re.search(rb"<<(.*?)>>", prompt, re.DOTALL)
        key = (submit.namespace, submit.prompt_ids)
        cached = len(prompt) - 1 if key in self._seen else 0
        self._seen.add(key)
        request = Running(submit, prompt, said[1] if said else b"ok", cached)
        if request.says("reject"):
            full = Rejected(submit.uid, "the queue is full", code="queue_full", status=429, retry_after_s=1.5)
            return self._send(frontend, full)
        if request.says("badgrammar"):
            return self._send(
                frontend, Rejected(submit.uid, "cannot be compiled", code="invalid_grammar", param="grammar")
            )
        self.running[frontend, submit.uid] = request
        return None

    def _abort(self, keys: list[Key]) -> None:
        for key in keys:
            request = self.running.pop(key, None)
            if request is not None:
                self.aborted.append(request.submit.request_id)
                self._send(key[0], Outputs([TokenEvent(key[1], [], FinishReason.ABORT)]))

    def _step(self) -> None:
        told: dict[bytes, Outputs] = defaultdict(Outputs)
        active = {key: request for key, request in self.running.items() if not request.says("silent")}
        if any(request.says("slow") for request in active.values()):
            time.sleep(0.02)
        for key, request in active.items():
            (frontend, uid), event = key, self._advance(key[1], request)
            if event == TokenEvent(uid, event.token_ids, cached_tokens=event.cached_tokens) and len(request.output) > 1:
                told[frontend].uids.append(uid)
                told[frontend].tokens.extend(event.token_ids)
            else:
                told[frontend].events.append(event)
            if event.finish is not None:
                del self.running[key]
        for frontend, outputs in told.items():
            self._send(frontend, outputs)

    def _advance(self, uid: int, request: Running) -> TokenEvent:
        sampling, count = request.submit.sampling, len(request.output)
        if request.says("fail") and count == 3:
            return TokenEvent(uid, [], FinishReason.ERROR, error="the logits are not finite")
        answer = request.answer
        ends = count >= len(answer) and not sampling.ignore_eos
        token = EOS if ends else answer[count % len(answer)]
        request.output.append(token)
        stops = token == EOS or token in sampling.stop_token_ids
        finish = FinishReason.STOP if stops else FinishReason.LENGTH if count + 1 == sampling.max_tokens else None
        return TokenEvent(
            uid,
            [token],
            finish,
            request.cached_tokens,
            stop_token_id=token if token in sampling.stop_token_ids else None,
            logprobs=None if sampling.logprobs is None else [_logprobs(token, sampling.logprobs)],
            prompt_logprobs=self._prompt_logprobs(request) if count == 0 else None,
            queue_s=0.5 if count == 0 else None,
            prefill_s=0.25 if count == 0 else None,
        )

    def _prompt_logprobs(self, request: Running) -> list[TokenLogprobs | None] | None:
        number = request.submit.sampling.prompt_logprobs
        if number is None:
            return None
        return [None, *(_logprobs(token, number) for token in request.prompt[1:])]

    def _status(self) -> EngineStatus:
        stats = EngineStats(running=len(self.running), aborted=len(self.aborted))
        return EngineStatus(
            os.getpid(),
            self.phase,
            detail="weights" if self.phase == "loading" else "",
            progress=0.25,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            stats=stats,
        )

    def _send(self, frontend: bytes, message: msgspec.Struct) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a frontend that has left
            body = msgspec.msgpack.encode(message)
            if frontend in self._damages:
                self._damages.remove(frontend)
                body = body[: len(body) // 2] + b"\xc1"
            self._socket.send_multipart([frontend, body], zmq.NOBLOCK)


def _view() -> EngineView:
    node = SeenNode(1, 0, len(TREE_TEXT), 1, 0, 1, 1, None, list(TREE_TEXT.encode()), [])
    event = TreeEvent("insert", "r", 1, len(TREE_TEXT), 1.0, [node], [(1, 1, 1)], [])
    return EngineView(1.0, 16, [node], [event], [SeenStep(1, 1.0, 2, 3, [("r", 0, 3)])], [])


def _logprobs(token: int, number: int) -> TokenLogprobs:
    """The chosen token first, then others that cannot come."""
    others = [(other, -float("inf")) for other in range(97, 97 + number - 1)]
    return TokenLogprobs(token, -0.5, [(token, -0.5), *others] if number else [])


@contextlib.contextmanager
def running_engine(address: str, phase: str = "ready") -> Iterator[FakeEngine]:
    engine = FakeEngine(address, phase)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        engine.stop()
        thread.join(5)


if __name__ == "__main__":
    FakeEngine(sys.argv[1]).run()
