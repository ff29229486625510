"""A frontend's end of the ZMQ line to the engine: whole messages in, whole messages out."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

import msgspec
import zmq

from radixserve.engine.messages import Outputs, ToEngine, ToFrontend, Unreadable

log = logging.getLogger("radixserve.server")

# A turn of the event loop hands out messages until these are so many: what is written in one turn leaves together, and
# a step of many requests shall not wait for the next, but a turn for each message of a few tokens would cost more.
TOKENS_A_TURN = 64


class EngineSocket:
    """Owns the DEALER socket.

    A plain socket with its file descriptor in the event loop, not zmq.asyncio: one message carries a whole step, which
    is handed to ``on_message`` right in the reader callback, without a future or a task switch in between. All calls
    come from one event loop, the one that runs at the first ``connect``.
    """

    def __init__(self, address: str, on_message: Callable[[ToFrontend], None]):
        self._address = address
        self._on_message = on_message
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToFrontend)
        self._context = zmq.Context()
        self._looking = False
        self.last_heard = -math.inf  # time.monotonic() of the last message of this connection

    def connect(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Nothing is queued while no engine listens: a send fails at once, and no stale request reaches the next engine.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        # Tokens must never be dropped here; open requests and their lengths bound what can queue up.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(self._address)
        self._loop.add_reader(self._socket.fileno(), self.look_soon)

    def disconnect(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self.last_heard = -math.inf

    def close(self) -> None:
        self.disconnect()
        self._context.term()

    def send(self, message: ToEngine) -> bool:
        """Whether it is on its way: False where no engine listens, or it takes no more."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # A send can swallow the edge that announces a received message.
        self.look_soon()
        return True

    def look_soon(self) -> None:
        """ZMQ's descriptor is edge-triggered: a call now and then bounds what a lost edge can cost."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Hand out what is there, but not all of it in one turn."""
        self._looking = False
        num_tokens = 0
        while num_tokens < TOKENS_A_TURN:
            if self._socket.closed:
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.last_heard = time.monotonic()
            message = self._decode(data)
            num_tokens += len(message.events) + len(message.uids) if isinstance(message, Outputs) else 1
            self._on_message(message)
        self.look_soon()

    def _decode(self, data: bytes) -> ToFrontend:
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            log.error("unreadable message of %d bytes from the engine: %s", len(data), error)
            return Unreadable()
