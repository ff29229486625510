"""The listening socket: bound once, before anything is loaded, and shared by all workers."""

from __future__ import annotations

import errno
import socket

from radixserve.engine.errors import ConfigError

# Connections that may wait to be accepted; the kernel cuts it to net.core.somaxconn.
BACKLOG = 4096


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host`` and ``port`` (0: a free one). Raises ``ConfigError`` that names the remedy."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    # Connections of an earlier server that are still closing must not keep the port from us.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_explain(error, host, port)) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
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
