"""The listening sockets: bound once, before anything is loaded."""

from __future__ import annotations

import errno
import socket
import sys
from typing import Any

from radixserve.engine.errors import ConfigError

# Connections that may wait to be accepted; the kernel cuts it to net.core.somaxconn.
BACKLOG = 4096
# Hosts that stand for all addresses of the machine.
WILDCARDS = ("0.0.0.0", "::")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host`` and ``port`` (0: a free one). Raises ``ConfigError`` that names the remedy."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror}") from error
    try:
        return _listener(found[0][0], found[0][4])
    except OSError as error:
        raise ConfigError(_explain(error, host, port)) from error


def listen_side_by_side(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` sockets on one port, one for each worker: the kernel spreads connections evenly over them. Workers that
    accept from one socket do not: whichever wakes first takes all that wait. Raises ``ConfigError``."""
    first = listen(host, port)
    if count == 1 or sys.platform != "linux":  # elsewhere the last socket may get everything
        return [first, *(first.dup() for _ in range(count - 1))]
    # It has shown that the port is free: sockets with SO_REUSEPORT would also join those of another server of ours.
    family, address = first.family, first.getsockname()
    first.close()
    try:
        return [_listener(family, address, reuse_port=True) for _ in range(count)]
    except OSError as error:
        raise ConfigError(_explain(error, host, address[1])) from error


def _listener(family: int, address: Any, *, reuse_port: bool = False) -> socket.socket:
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # "::" is all addresses, those of IPv4 too
    return socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=reuse_port, dualstack_ipv6=both)


def url_of(listener: socket.socket) -> str:
    """Where clients on this machine reach it: a socket on all addresses has none that a browser could open."""
    host, port = listener.getsockname()[:2]
    if host in WILDCARDS:
        return f"http://localhost:{port}"
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def _explain(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is taken: stop what listens there, or choose another with --port (0: any)"
        case errno.EACCES:
            return f"port {port} needs privileges: choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is no address of this machine (0.0.0.0 is all of them)"
        case _:
            return f"cannot listen on {host} port {port}: {error.strerror}"
