"""The engine's side of the ZMQ socket: messages in and out, and which frontends live. No torch."""

import errno
import logging
import os

import msgspec
import zmq

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.lifeline import is_alive
from radixserve.engine.messages import EngineStatus, Hello, Rejected, ToEngine, ToFrontend, Unreadable

_log = logging.getLogger(__name__)

# Messages taken in between two steps at most, so that a flood of them cannot hold up running requests.
_MAX_MESSAGES = 512

_LINGER_MS = 1000


class Frontends:
    """Owns the ROUTER socket at ``address`` and the list of frontends, each known by its socket's identity.

    A frontend is watched from its ``Hello`` on, by its pid, and is gone when that process ends or its socket closes.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a closed socket is an error, not a silent drop
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a slow frontend must not stop the others
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._known: dict[bytes, None] = {}
        self._by_pidfd: dict[int, bytes] = {}
        self._unwatched: dict[bytes, int] = {}  # pids of frontends where the system has no pidfd
        self._gone: list[bytes] = []

    def receive(self, timeout_ms: int) -> list[tuple[bytes, ToEngine]]:
        """Messages that are here, waiting up to ``timeout_ms`` for the first. Malformed ones are refused."""
        for ready, _ in self._poller.poll(timeout_ms):
            if isinstance(ready, int):
                self._lose(self._by_pidfd[ready])
        messages: list[tuple[bytes, ToEngine]] = []
        for _ in range(_MAX_MESSAGES):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            frontend, body = frames[0], frames[-1]
            self._known[frontend] = None
            message = self._decode(frontend, body)
            if isinstance(message, Hello):
                self._watch(frontend, message.pid)
            if message is not None:
                messages.append((frontend, message))
        return messages

    def send(self, frontend: bytes, message: ToFrontend) -> None:
        """Never blocks; a frontend that cannot be reached is gone."""
        try:
            self._socket.send_multipart([frontend, self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            self._lose(frontend)

    def tell_all(self, status: EngineStatus) -> None:
        for frontend in list(self._known):
            self.send(frontend, status)

    def take_gone(self) -> list[bytes]:
        """Frontends lost since the last call."""
        for frontend, pid in list(self._unwatched.items()):
            if not is_alive(pid):
                self._lose(frontend)
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        """Give what was sent a moment to leave, then close."""
        for pidfd in self._by_pidfd:
            os.close(pidfd)
        self._by_pidfd.clear()
        self._socket.close()
        self._context.term()

    def _decode(self, frontend: bytes, body: bytes) -> ToEngine | None:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, InvalidRequest, ValueError) as error:
            _log.warning("malformed message of %d bytes from a frontend: %s", len(body), error)
            uid = _submitted_uid(body)
            if uid is None:
                self.send(frontend, Unreadable())
            else:
                param = error.param if isinstance(error, InvalidRequest) else None
                self.send(frontend, Rejected(uid, f"malformed request: {error}", code="malformed", param=param))
            return None

    def _watch(self, frontend: bytes, pid: int) -> None:
        if frontend in self._by_pidfd.values():
            return  # it greets again whenever it heard nothing for a while
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._lose(frontend)
        except (OSError, AttributeError):  # no such call on this system, or it is forbidden
            self._unwatched[frontend] = pid
        else:
            self._by_pidfd[pidfd] = frontend
            self._poller.register(pidfd, zmq.POLLIN)

    def _lose(self, frontend: bytes) -> None:
        if frontend not in self._known:
            return
        del self._known[frontend]
        self._unwatched.pop(frontend, None)
        for pidfd in [fd for fd, owner in self._by_pidfd.items() if owner == frontend]:
            self._poller.unregister(pidfd)
            del self._by_pidfd[pidfd]
            os.close(pidfd)
        self._gone.append(frontend)


def _submitted_uid(body: bytes) -> int | None:
    """The uid of what looks like a ``Submit`` that could not be decoded."""
    try:
        raw = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return None
    uid = raw.get("uid") if isinstance(raw, dict) and raw.get("type") == "submit" else None
    return uid if isinstance(uid, int) else None
