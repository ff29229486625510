"""A supervisor with tiny children, as a process of its own. Each child writes what happens to it into a log file.

Run as ``python fake_service.py LOG ENGINE_PLAN [flags of radixserve serve]``. Plans of the engine: ``run`` (until the
lifeline ends), ``crash`` (at once, every time), ``hopeless`` (exit status 3), ``deaf`` (ignores its lifeline).
Workers leave when they are told to drain, after the seconds in FAKE_DRAIN_S.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path


def note(log: Path, *words: object) -> None:
    with log.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def run_child(log: Path, name: str, plan: str) -> None:
    from radixserve.engine import lifeline

    config = lifeline.read_config()
    note(log, name, "started", os.getpid(), config.served_model_name, os.environ[lifeline.IPC_VARIABLE])
    if plan == "crash":
        sys.exit(1)
    if plan == "hopeless":
        sys.exit(lifeline.EXIT_HOPELESS)
    if plan == "deaf":
        signal.alarm(60)  # the longest that it may outlive a supervisor that was killed
        signal.pause()

    def leave() -> None:
        note(log, name, "drained")
        os._exit(0)

    def on_drain(seconds: float) -> None:
        note(log, name, "drains", seconds)
        threading.Timer(float(os.environ["FAKE_DRAIN_S"]), leave).start()

    lifeline.watch(on_drain if name == "worker" else None)
    while True:
        time.sleep(60)


def run_supervisor(log: Path, plan: str, flags: list[str]) -> int:
    from radixserve.engine.errors import ConfigError
    from radixserve.server.commands.serve import parse_flags, read_config
    from radixserve.server.supervisor import Commands, RestartPolicy, serve

    commands = Commands(
        engine=(sys.executable, __file__, str(log), "child", "engine", plan),
        worker=(sys.executable, __file__, str(log), "child", "worker", "run"),
    )
    try:
        return serve(read_config(parse_flags(flags), {}), commands, RestartPolicy(max_restarts=2, first_pause_s=0.01))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    log_path, plan, *rest = Path(sys.argv[1]), *sys.argv[2:]
    if plan == "child":
        run_child(log_path, *rest)
    else:
        sys.exit(run_supervisor(log_path, plan, rest))
