"""The ``radixserve serve`` process: starts the engine and the workers, restarts what dies, and stops all in order.

A task keeps each child running, on one event loop that sleeps until a signal arrives (SIGCHLD included) or a pause or
deadline is over. It loads neither torch nor FastAPI, so there is little in it that could die; should it be killed, its
children see their lifelines end and leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from radixserve.configs.schema import ServeConfig
from radixserve.engine.host import has_gpu, raise_file_limit, usable_cores
from radixserve.engine.lifeline import EXIT_HOPELESS, IPC_VARIABLE, LISTEN_FD_VARIABLE, URL_VARIABLE
from radixserve.engine.logs import announce
from radixserve.server.listening import WILDCARDS, listen_side_by_side, url_of
from radixserve.server.runtime_folder import runtime_folder

logger = logging.getLogger(__name__)

EXIT_FAILED = 1

# Workers end requests that are still running after --drain-timeout; only a stuck worker needs this much more.
_DRAIN_MARGIN_S = 5.0
# From the end of the lifeline to SIGKILL. A child leaves at once unless a C call holds its interpreter.
_LEAVE_S = 3.0
# For workers to tell their clients that the service has given up: a little more than they take for it.
_FAREWELL_S = 3.0
# Frontend processes by default, on the host of a GPU: one for so many cores, but not more than that.
_CORES_PER_WORKER, _MOST_WORKERS = 4, 4
# Signals that come as close as this are one: `make` and the terminal may both pass on the same Ctrl-C.
_SAME_SIGNAL_S = 0.5
_STDERR_FD = 2
_HINTS = {
    "SIGKILL": " (often the kernel's answer to a lack of memory: lower --num-pages or --max-model-len, or allow more; "
    "or the watchdog, if it says so above)",
    "SIGABRT": " (a crash in native code, or the watchdog; where it was stands above)",
}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one: the terminal was closed


@dataclass(frozen=True, slots=True)
class Commands:
    """How children are started. ``-P`` keeps the current folder, whatever is in it, from being imported."""

    engine: tuple[str, ...] = (sys.executable, "-P", "-m", "radixserve.engine.process")
    worker: tuple[str, ...] = (sys.executable, "-P", "-m", "radixserve.server.worker")


def serve(config: ServeConfig, commands: Commands, policy: RestartPolicy) -> int:
    """Serve until a signal or a failure; returns the exit status. Raises ``ConfigError`` when the port is not ours."""
    _open_standard_streams()
    raise_file_limit()
    num_workers = config.api_workers or default_api_workers(config, usable_cores(), gpu=has_gpu())
    return asyncio.run(_serve(config.model_copy(update={"api_workers": num_workers}), num_workers, commands, policy))


async def _serve(config: ServeConfig, num_workers: int, commands: Commands, policy: RestartPolicy) -> int:
    supervisor = Supervisor(config, policy)
    supervisor.listen_to_signals()
    with contextlib.ExitStack() as listening, runtime_folder() as folder:
        listeners = listen_side_by_side(config.host, config.port, num_workers)
        for listener in listeners:
            listening.enter_context(listener)
        url = url_of(listeners[0])
        everywhere = " (on all addresses)" if config.host in WILDCARDS else ""
        announce(
            config.log_format, f"radixserve listens on {url}{everywhere} and loads {config.model}; Ctrl-C stops it"
        )
        environment = {IPC_VARIABLE: f"ipc://{folder}/engine.sock", URL_VARIABLE: url}
        engine = Child("engine", commands.engine, environment)
        workers = [
            Child(f"worker {index}", commands.worker, {**environment, LISTEN_FD_VARIABLE: str(fd)}, (fd,))
            for index, fd in enumerate(listener.fileno() for listener in listeners)
        ]
        return await supervisor.run(engine, workers, listeners)


def default_api_workers(config: ServeConfig, num_cores: int, *, gpu: bool) -> int:
    """A GPU's thousands of tokens a second are shared by several frontends, so that no client waits for the text of all
    others, and the engine's processes keep a core each. On a CPU the model needs the cores, and one is plenty."""
    if config.device == "cpu" or not gpu:
        return 1
    free_cores = num_cores + 1 - config.tensor_parallel_size
    return max(1, min(_MOST_WORKERS, free_cores // _CORES_PER_WORKER))


def _open_standard_streams() -> None:
    """Put /dev/null where one was closed: else our sockets would get its number, and children them for their input."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR_FD:
        os.set_inheritable(fd, True)
    os.close(fd)


# ---- one child ----


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often, and how soon, a child that died is started again."""

    max_restarts: int = 5
    window_s: float = 600.0  # longer than a large model loads, or a loop that dies while loading goes on for ever
    first_pause_s: float = 0.2
    max_pause_s: float = 5.0

    def pause_s(self, deaths: Sequence[float], now: float) -> float | None:
        """Seconds to wait before the next start, or None to give up. ``deaths``: times, the latest included."""
        recent = sum(now - death < self.window_s for death in deaths)
        if recent > self.max_restarts:
            return None
        return float(min(self.first_pause_s * 2 ** (recent - 1), self.max_pause_s))


@dataclass(slots=True, eq=False)
class Child:
    """Owns the process that runs ``command`` now, if one does, and the write end of its lifeline. ``environment`` is
    added to ours; ``pass_fds`` stay open in the child."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    deaths: list[float] = field(default_factory=list)
    ended: asyncio.Future[int] = field(init=False)  # the exit status (negative: the signal) of what was started last

    @property
    def alive(self) -> bool:
        return self.process is not None

    def start(self, first_line: str) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        # The child inherits the blocked signals, and unblocks them when it ignores them; without this a Ctrl-C during
        # its imports would kill it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                pass_fds=self.pass_fds,
                env={**os.environ, **self.environment},
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.send(first_line)

    def send(self, line: str) -> None:
        """Write a line to the lifeline; a child that is just dying does not hear it."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(line.encode() + b"\n")

    def reap(self) -> None:
        """Notice that the process has ended, if so."""
        if self.process is not None and (status := self.process.poll()) is not None:
            self.close_lifeline()
            self.process = None
            self.ended.set_result(status)

    def close_lifeline(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}{_HINTS.get(name, '')}"


# ---- all of them ----


@dataclass(slots=True)
class Supervisor:
    """Owns the children and decides when they start and stop."""

    config: ServeConfig
    policy: RestartPolicy
    children: list[Child] = field(default_factory=list)  # the workers, and the engine
    workers: list[Child] = field(default_factory=list)
    listeners: list[socket.socket] = field(default_factory=list)
    first_stop_at: float | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is started any more
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    exit_status: int = 0  # once the end is decided

    def listen_to_signals(self) -> None:
        """From now on they come through the event loop, and wait for ``run``."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._on_deaths)
        for number in STOP_SIGNALS:
            # nohup: the server is to outlive its terminal
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_stop, number)

    async def run(self, engine: Child, workers: list[Child], listeners: list[socket.socket]) -> int:
        """Supervise until the end, in which no child is left; returns the exit status of the service."""
        self.children, self.workers, self.listeners = [engine, *workers], workers, listeners
        async with asyncio.TaskGroup() as group:
            keepers = [group.create_task(self._keep(child)) for child in self.children]
            try:
                await self.decided.wait()
            finally:
                await self._end_children()
                for keeper in keepers:
                    keeper.cancel()
        return self.exit_status

    async def _keep(self, child: Child) -> None:
        """Start ``child``, again whenever it has died, until the service stops."""
        while not self.stopping.is_set():
            child.start(self.config.to_private_json())
            status = await child.ended
            if self.decided.is_set():
                return  # as it should
            if not self.stopping.is_set():
                await self._pause(child, status)
            elif child not in self.workers or status != 0:
                logger.warning("%s %s while stopping", child.name, describe_exit(status))
        if not any(worker.alive for worker in self.workers):
            self._finish(0)

    async def _pause(self, child: Child, status: int) -> None:
        """Wait until ``child``, which has died, may be started again, or give up."""
        now = time.monotonic()
        child.deaths.append(now)
        pause_s = self.policy.pause_s(child.deaths, now)
        if status == EXIT_HOPELESS:
            logger.error("%s cannot run (its error is above); giving up", child.name)
            self._finish(EXIT_FAILED)
        elif pause_s is None:
            logger.error(
                "%s %s, %d times within %g s; giving up",
                *(child.name, describe_exit(status), self.policy.max_restarts + 1, self.policy.window_s),
            )
            self._finish(EXIT_FAILED)
        else:
            logger.error("%s %s; starting it again in %.1f s", child.name, describe_exit(status), pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), pause_s)

    def _on_deaths(self) -> None:
        for child in self.children:
            child.reap()

    def _on_stop(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.first_stop_at is None:
            self.first_stop_at = now
            self._begin_drain()
        elif now - self.first_stop_at > _SAME_SIGNAL_S and not self.decided.is_set():
            logger.warning("second %s: stopping at once", number.name)
            self._finish(128 + number)

    def _begin_drain(self) -> None:
        drain_s = self.config.drain_timeout
        logger.info("stopping: running requests get %g s to finish; a second signal stops at once", drain_s)
        self.stopping.set()
        for listener in self.listeners:
            listener.close()  # with the workers' copies closed too, new connections are refused
        for worker in self.workers:
            worker.send(f"drain {drain_s}")
        asyncio.get_running_loop().call_later(drain_s + _DRAIN_MARGIN_S, self._cut_off)

    def _cut_off(self) -> None:
        if not self.decided.is_set():
            logger.warning("requests still run after the drain timeout: cutting them off")
            self._finish(0)

    def _finish(self, exit_status: int) -> None:
        """Decide the end; the first decision stands."""
        if not self.decided.is_set():
            self.exit_status = exit_status
            self.decided.set()
            self.stopping.set()

    async def _end_children(self) -> None:
        """End all lifelines, and kill those that do not leave. Who gives up lets the workers tell their clients."""
        if self.exit_status == EXIT_FAILED:
            for worker in self.workers:
                worker.send("drain 0")
            await _ends(self.workers, _FAREWELL_S)
        for child in self.children:
            child.close_lifeline()
        for child in await _ends(self.children, _LEAVE_S):
            logger.warning("%s does not leave: killing it", child.name)
            child.kill()
        await _ends(self.children, _LEAVE_S)


async def _ends(children: Sequence[Child], patience_s: float) -> list[Child]:
    """Wait until they have left, but no longer than that; returns those that have not."""
    if running := [child.ended for child in children if child.alive]:
        await asyncio.wait(running, timeout=patience_s)
    return [child for child in children if child.alive]
