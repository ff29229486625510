"""Builds a target of the Dockerfile without a container engine, and tries what a container would do.

Each step runs in the order of the Dockerfile in a copy of a bare root folder, by chroot. Then the entry point is
started as the image's user and as process 1, and is given a health check, a chat and SIGTERM. Port 8000 must be free.
Needs root, and ``unshare`` and ``setpriv`` of util-linux:

    debootstrap --include=python3,python3-venv,ca-certificates bookworm /tmp/debian
    python3 scripts/dockerfile_chroot.py cpu /tmp/image --base cpu-base=/tmp/debian

``--bind PATH`` shows a file or folder of this machine in every step (the configuration of a package registry, say).
What follows ``--`` goes to the entry point.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

CONTEXT = Path(__file__).parents[1]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# In namespaces of its own: the command is process 1, as in a container, and nothing stays mounted or running.
ENTER = """root=$1; shift
mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" && mount -t tmpfs tmpfs "$root/dev/shm" || exit 125
cp /etc/resolv.conf "$root/etc/resolv.conf"
for path in $BINDS; do
    if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$(dirname "$root$path")"; touch "$root$path"; fi
    mount --bind "$path" "$root$path" || exit 125
done
exec chroot "$root" "$@" """


@dataclass
class Stage:
    """What the steps of one stage made: a root folder, and what a container from it starts with."""

    root: Path
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "HOME": "/root"})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "root"
    entry_point: list[str] = field(default_factory=list)
    health_check: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


class Builder:
    """Runs the steps of the stages that a target needs, below ``folder``."""

    def __init__(self, folder: Path, bases: dict[str, str], binds: list[str]) -> None:
        self._folder = folder
        self._bases = bases
        self._binds = binds
        self._stages: dict[str, Stage] = {}
        self._steps: dict[str, list[tuple[str, str]]] = {}
        for name, rest in instructions((CONTEXT / "Dockerfile").read_text()):
            if name == "FROM":
                image, _, stage = rest.partition(" AS ")
                self._steps[stage] = [(name, image)]
            else:
                self._steps[stage].append((name, rest))

    def build(self, name: str) -> Stage:
        if name in self._stages:
            return self._stages[name]
        stage = self._stages[name] = Stage(self._folder / name)
        (_, image), *steps = self._steps[name]
        origin = self._bases.get(name) or self.build(image).root
        if image in self._stages:
            stage.variables |= self._stages[image].variables
        subprocess.run(["cp", "--archive", "--reflink=auto", f"{origin}/.", stage.root], check=True)
        for step in steps:
            begin = time.monotonic()
            self._take(stage, *step)
            print(f"{name}: {time.monotonic() - begin:6.1f} s  {' '.join(step)[:100]}", flush=True)
        return stage

    def _take(self, stage: Stage, name: str, rest: str) -> None:
        match name:
            case "RUN":
                self.start(stage, ["sh", "-c", rest]).wait_or_fail()
            case "COPY":
                self._copy(stage, shlex.split(rest))
            case "ENV":
                _assign(stage.variables, rest)
            case "ARG":
                _assign(stage.arguments, rest)
            case "WORKDIR":
                stage.folder = rest
                (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                stage.user, stage.variables["HOME"] = rest, f"/home/{rest}"
            case "ENTRYPOINT":
                stage.entry_point = json.loads(rest)
            case "HEALTHCHECK":
                stage.health_check = json.loads(rest.partition(" CMD ")[2])
            case "EXPOSE":
                pass
            case _:
                raise ValueError(f"{name} is not understood here")

    def _copy(self, stage: Stage, words: list[str]) -> None:
        source, target = [word for word in words if not word.startswith("--")]
        place = stage.root / os.path.join(stage.folder, target).lstrip("/")
        if words[0].startswith("--from="):
            origin = self.build(words[0].partition("=")[2]).root / source.lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "--archive", f"{origin}/.", place], check=True)
            return
        for path in context_files():
            if source in (".", path):
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CONTEXT / path, place / path)

    def start(self, stage: Stage, command: list[str], *, quiet: bool = False) -> Process:
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "enter", str(stage.root)]
        user = ["setpriv", f"--reuid={stage.user}", f"--regid={stage.user}", "--init-groups"]
        assignments = [f"{key}={value}" for key, value in (stage.arguments | stage.variables).items() if value]
        inner = ["sh", "-c", 'cd "$0" && exec "$@"', stage.folder, "env", "-i", *assignments, *command]
        environment = {**os.environ, "BINDS": " ".join(self._binds)}
        return Process([*enter, *user, *inner], env=environment, stderr=subprocess.DEVNULL if quiet else None)


def _assign(variables: dict[str, str], assignments: str) -> None:
    for word in shlex.split(assignments):
        name, _, value = word.partition("=")
        variables[name] = re.sub(r"\$(\w+)", lambda found: variables[found[1]], value)


class Process(subprocess.Popen[bytes]):
    def wait_or_fail(self, timeout: float | None = None) -> None:
        if status := self.wait(timeout):
            raise SystemExit(f"exit status {status}: {self.args}")


def context_files() -> list[str]:
    """Tracked files that .dockerignore lets through: the last pattern that fits a path or a folder above it decides."""
    patterns = (CONTEXT / ".dockerignore").read_text().split("\n")
    rules = [line for line in patterns if line and not line.startswith("#")]

    def is_sent(path: str) -> bool:
        names = [path, *(str(parent) for parent in Path(path).parents)]
        hits = [rule for rule in rules if any(fnmatch.fnmatch(name, rule.lstrip("!")) for name in names)]
        return not hits or hits[-1].startswith("!")

    listed = subprocess.run(["git", "ls-files"], cwd=CONTEXT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\n") if path and is_sent(path)]


def try_out(builder: Builder, image: Stage, arguments: list[str]) -> None:
    """Serve as a container would: the health check succeeds, a chat is answered, SIGTERM ends it with status 0."""
    begin = time.monotonic()
    server = builder.start(image, [*image.entry_point, *arguments])
    try:
        while builder.start(image, image.health_check, quiet=True).wait(30):
            if server.poll() is not None or time.monotonic() - begin > 600:
                raise SystemExit("the server does not become healthy")
            time.sleep(1)
        main_pid = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text())
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{main_pid}/status").read_text().splitlines())
        print(f"healthy after {time.monotonic() - begin:.1f} s, user ids {status['Uid']}, pids {status['NSpid']}")
        if "0" in status["Uid"].split():
            raise SystemExit("the server runs as root")
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        request = urllib.request.Request(
            "http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            print(json.load(response)["choices"][0]["message"]["content"])
        os.kill(main_pid, signal.SIGTERM)
        server.wait_or_fail(60)
        print("ended by SIGTERM with status 0")
    finally:
        if server.poll() is None:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the stage to build")
    parser.add_argument("folder", type=Path, help="a new folder; each stage becomes a folder below it")
    parser.add_argument("--base", action="append", default=[], metavar="STAGE=ROOT", help="a root folder to begin with")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH", help="to show in every step")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="of the entry point")
    flags = parser.parse_args()
    flags.folder.mkdir(parents=True)
    builder = Builder(flags.folder.resolve(), dict(base.split("=", 1) for base in flags.base), flags.bind)
    try_out(builder, builder.build(flags.target), flags.arguments)


if __name__ == "__main__":
    sys.exit(main())
