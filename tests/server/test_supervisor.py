"""The supervisor as a real process, over tiny children: how it stops, what it restarts, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

PATIENCE_S = 30.0


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


class Service:
    """A running fake service, in a process group of its own."""

    def __init__(
        self, log: Path, runtime: Path, plan: str, flags: Sequence[str], drain_s: float, prefix: Sequence[str]
    ) -> None:
        self.log = log
        self.log.touch()
        self.runtime = runtime
        self.process = subprocess.Popen(
            [*prefix, sys.executable, Path(__file__).with_name("fake_service.py"), self.log, plan, "--port=0", *flags],
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.runtime), "FAKE_DRAIN_S": str(drain_s)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
        )

    def events(self, *start: str) -> list[list[str]]:
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [line for line in lines if line[: len(start)] == list(start)]

    def pids(self, name: str) -> list[int]:
        return [int(line[2]) for line in self.events(name, "started")]

    def await_start(self, workers: int = 1) -> None:
        eventually(
            lambda: self.process.poll() is not None or (self.pids("engine") and len(self.pids("worker")) == workers)
        )
        assert self.process.poll() is None, self.end()

    def signal_group(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """Wait until it has ended by itself; returns exit status and standard error."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors

    def assert_nothing_left(self) -> None:
        eventually(lambda: not any(psutil.pid_exists(pid) for pid in self.pids("engine") + self.pids("worker")))
        assert list(self.runtime.iterdir()) == []


Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    services: list[Service] = []
    with tempfile.TemporaryDirectory(prefix="rs-") as runtime:  # short, as paths of sockets must be

        def start_service(plan: str = "run", *flags: str, drain_s: float = 0, prefix: Sequence[str] = ()) -> Service:
            services.append(Service(tmp_path / "log", Path(runtime), plan, flags, drain_s, prefix))
            return services[-1]

        yield start_service
        for service in services:
            with service.process:  # closes its pipes
                service.process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("to_group", [False, True])
def test_a_stop_signal_drains_the_workers_and_ends_with_status_0(start: Start, number: int, to_group: bool) -> None:
    service = start("run", "--api-workers=2", "--drain-timeout=7", drain_s=0.2)
    service.await_start(workers=2)
    if to_group:
        service.signal_group(number)
    else:
        service.process.send_signal(number)
    assert service.end()[0] == 0
    assert service.events("worker", "drains") == [["worker", "drains", "7.0"]] * 2
    assert len(service.events("worker", "drained")) == 2
    service.assert_nothing_left()


def test_a_server_started_with_nohup_outlives_its_terminal(start: Start) -> None:
    service = start(prefix=("nohup",))
    service.await_start()
    service.signal_group(signal.SIGHUP)
    service.process.terminate()
    assert service.end()[0] == 0
    assert service.events("worker", "drains") == [["worker", "drains", "30.0"]]
    service.assert_nothing_left()


@pytest.mark.parametrize("redirections", ["<&- >&- 2>&-", "<&-", ">/dev/full 2>&1", ">&-"])
def test_closed_or_full_standard_streams_do_not_stop_it(start: Start, redirections: str) -> None:
    service = start(prefix=("sh", "-c", f'exec "$@" {redirections}', "sh"))
    service.await_start()
    service.process.terminate()
    assert service.end()[0] == 0
    service.assert_nothing_left()


def test_children_may_open_as_many_files_as_the_system_lets_them(start: Start) -> None:
    service = start(prefix=("sh", "-c", 'ulimit -S -n 128; exec "$@"', "sh"))
    service.await_start()
    soft, hard = psutil.Process(service.pids("worker")[0]).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard > 128


def test_a_second_signal_stops_at_once(start: Start) -> None:
    service = start(drain_s=600)
    service.await_start()
    service.process.terminate()
    eventually(lambda: service.events("worker", "drains"))
    time.sleep(0.6)  # two signals at nearly the same time count as one
    service.process.terminate()
    assert service.end()[0] == 128 + signal.SIGTERM
    assert not service.events("worker", "drained")
    service.assert_nothing_left()


def test_the_same_signal_passed_on_twice_is_one(start: Start) -> None:
    service = start(drain_s=1)
    service.await_start()
    service.signal_group(signal.SIGTERM)
    service.process.terminate()
    assert service.end()[0] == 0
    assert service.events("worker", "drained")


def test_no_new_connection_is_taken_while_draining(start: Start) -> None:
    service = start(drain_s=600)
    service.await_start()
    port = _port_of(service)
    socket.create_connection(("127.0.0.1", port)).close()
    # The fake worker does not close its copy of the socket, as a real one does: look at the supervisor's.
    service.process.terminate()
    eventually(lambda: service.events("worker", "drains"))
    listening = [c for c in psutil.Process(service.process.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening == []


def test_a_killed_supervisor_leaves_no_orphan_and_the_next_one_cleans_up(start: Start) -> None:
    service = start("run", "--api-workers=2")
    service.await_start(workers=2)
    service.process.kill()
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in service.pids("engine") + service.pids("worker")))
    (left_over,) = service.runtime.iterdir()
    after = start()
    eventually(lambda: len(after.pids("worker")) == 3)
    assert left_over not in after.runtime.iterdir()
    after.process.terminate()
    assert after.end()[0] == 0
    after.assert_nothing_left()


def test_the_folder_of_a_living_server_is_private_and_spared_by_others(start: Start) -> None:
    first = start()
    first.await_start()
    (folder,) = first.runtime.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    second = start()
    eventually(lambda: len(second.pids("worker")) == 2)
    assert folder in second.runtime.iterdir()


@pytest.mark.parametrize("name", ["engine", "worker"])
def test_a_killed_child_is_started_again(start: Start, name: str) -> None:
    service = start()
    service.await_start()
    os.kill(service.pids(name)[0], signal.SIGKILL)
    eventually(lambda: len(service.pids(name)) == 2)
    service.process.terminate()
    status, errors = service.end()
    assert status == 0
    assert name in errors and "was killed by SIGKILL" in errors
    service.assert_nothing_left()


def test_a_crash_loop_is_given_up(start: Start) -> None:
    service = start("crash")
    status, errors = service.end()
    assert status == 1
    assert len(service.pids("engine")) == 3
    assert "engine ended with exit status 1, 3 times within 600 s; giving up" in errors
    assert service.events("worker", "drains") == [["worker", "drains", "0.0"]]  # so that clients hear of it
    service.assert_nothing_left()


def test_an_engine_that_can_never_work_is_not_started_again(start: Start) -> None:
    service = start("hopeless")
    status, errors = service.end()
    assert status == 1
    assert len(service.pids("engine")) == 1
    assert "engine cannot run" in errors
    service.assert_nothing_left()


def test_a_child_that_does_not_leave_is_killed(start: Start) -> None:
    service = start("deaf")
    service.await_start()
    service.process.terminate()
    status, errors = service.end()
    assert status == 0
    assert "engine does not leave: killing it" in errors
    service.assert_nothing_left()


def test_a_taken_port_is_an_error_that_names_it(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = start("run", f"--port={port}")
        status, errors = service.end()
    assert status == 2
    assert f"port {port} on 127.0.0.1 is taken" in errors and "--port" in errors
    assert not service.pids("engine")


def test_the_port_listens_before_any_child_runs_and_is_announced(start: Start) -> None:
    service = start("deaf")
    with socket.create_connection(("127.0.0.1", _port_of(service))):
        pass


def test_children_get_the_configuration_but_no_command_line_tells_secrets(start: Start) -> None:
    service = start("run", "--api-key=k-secret", "--served-model-name=mine")
    service.await_start()
    (engine,) = service.events("engine", "started")
    assert engine[3] == "('mine',)" and engine[4].startswith(f"ipc://{service.runtime}/")
    for pid in service.pids("engine") + service.pids("worker"):
        assert "k-secret" not in " ".join(psutil.Process(pid).cmdline())


def _port_of(service: Service) -> int:
    assert service.process.stdout is not None
    line = service.process.stdout.readline()
    return int(line.split("http://127.0.0.1:")[1].split()[0])
