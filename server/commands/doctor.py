"""``radixserve doctor``: looks for what would keep a server from running, or from running well."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from radixserve import __version__
from radixserve.configs.schema import DEFAULT_MODEL, ServeConfig
from radixserve.engine.errors import ConfigError, ModelError
from radixserve.engine.host import available_memory, usable_cores
from radixserve.engine.model_files import resolve_model
from radixserve.server.commands.gpus import Gpu, find_gpus
from radixserve.server.commands.parser import Parser
from radixserve.server.listening import listen
from radixserve.server.runtime_folder import runtime_folder

# A connection takes a descriptor; below this a few hundred clients with their files and sockets run into the limit.
_MIN_OPEN_FILES = 4096
_LOW_MEMORY = 1 << 30
_PACKAGES = ("torch", "transformers", "triton", "flashinfer-python")
_MARKS = {"ok": "ok   ", "weak": "weak ", "broken": "BROKEN"}


@dataclass(frozen=True, slots=True)
class Finding:
    """``weak``: it works, but could work better. ``broken``: `radixserve serve` would fail. ``remedy`` for both."""

    state: Literal["ok", "weak", "broken"]
    what: str
    remedy: str = ""


def build_parser() -> Parser:
    defaults = ServeConfig()
    parser = Parser(
        prog="radixserve doctor",
        description="Tell what was found on this machine, and what to do about it. Exit status 1: something is broken.",
    )
    parser.add_argument("--host", default=defaults.host, help="address that the server would listen on")
    parser.add_argument("--port", type=int, default=defaults.port, help="port that the server would listen on")
    return parser


def run(arguments: Sequence[str]) -> int:
    flags = build_parser().parse_args(arguments)
    broken = False
    for finding in _findings(flags.host, flags.port):
        broken |= finding.state == "broken"
        print(f"{_MARKS[finding.state]:<7}{finding.what}", flush=True)
        if finding.remedy:
            print(f"       -> {finding.remedy}")
    return int(broken)


def _findings(host: str, port: int) -> Iterator[Finding]:
    gpus = find_gpus()
    yield Finding("ok", f"radixserve {__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield _cores()
    yield check_memory(available_memory())
    yield Finding("ok", _packages())
    yield from check_device(gpus, _probe())
    yield _default_model()
    yield check_port(host, port)
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _folder()


def _cores() -> Finding:
    cores, all_cores = usable_cores(), os.cpu_count() or 1
    limited = f" of {all_cores}; an affinity mask or a control group limits them" if cores < all_cores else ""
    return Finding("ok", f"{cores} CPU cores{limited}")


def check_memory(num_bytes: int) -> Finding:
    what = f"{num_bytes / 2**30:.1f} GiB of memory are free, control group included"
    if num_bytes >= _LOW_MEMORY:
        return Finding("ok", what)
    return Finding("weak", what, "free some, or raise the container's limit: the default model needs about 1 GiB")


def _packages() -> str:
    installed = {package.name: package.version for package in metadata.distributions()}
    return ", ".join(f"{name} {installed.get(name, '(not installed)')}" for name in _PACKAGES)


def _probe() -> dict[str, Any]:
    """``engine/probe.py`` in a process of its own: torch takes seconds and memory, and can fail in many ways."""
    command = [sys.executable, "-P", "-m", "radixserve.engine.probe"]
    if sys.stderr.isatty():  # compiling the kernels of a CPU, the first time, takes half a minute
        print("\rtrying torch and the kernels ...", end="", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"error": f"torch does not work: {lines[-1]}"}


def check_device(gpus: Sequence[Gpu], probed: dict[str, Any]) -> Iterator[Finding]:
    for gpu in gpus:
        memory = f"{gpu.free_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB free"
        yield Finding("ok", f"GPU {gpu.index}: {gpu.name}, driver {gpu.driver}, {memory}")
    if not gpus:
        yield Finding("ok", "no NVIDIA GPU (nvidia-smi finds none): models run on the CPU")
    if "error" in probed:
        yield Finding("broken", probed["error"], "install the locked packages: make setup, or pip install .")
        return
    if gpus and probed["device"] != "cuda":
        built = f"torch is built for CUDA {probed['cuda']}" if probed["cuda"] else "torch is built without CUDA"
        yield Finding("broken", f"torch cannot use the GPU; {built}", "install a torch that fits the driver")
    kernels = f"attention {probed['attention']}, layers {probed['ops']}"
    what = f"models run on {probed['device']} in {probed['dtype']}; kernels: {kernels}"
    if slow := probed.get("slow"):
        reason, _, remedy = slow.partition(": ")
        yield Finding("weak", f"{what}: several times slower than the native ones, as {reason}", remedy)
    else:
        yield Finding("ok", what)


def _default_model() -> Finding:
    try:
        resolve_model(DEFAULT_MODEL)
    except ModelError as error:
        return Finding("weak", str(error), "or serve another model: radixserve serve owner/name")
    return Finding("ok", f"the default model, {DEFAULT_MODEL}, is installed")


def check_port(host: str, port: int) -> Finding:
    try:
        with listen(host, port):
            return Finding("ok", f"port {port} on {host} is free")
    except ConfigError as error:
        return Finding("broken", *str(error).split(": ", 1))


def check_open_files(limit: int) -> Finding:
    what = f"{'any number of' if limit == resource.RLIM_INFINITY else limit} files and connections may be open"
    if limit == resource.RLIM_INFINITY or limit >= _MIN_OPEN_FILES:
        return Finding("ok", what)
    return Finding("weak", what, "more clients need more: ulimit -n 65536 (systemd: LimitNOFILE=65536)")


def _folder() -> Finding:
    try:
        with runtime_folder() as folder:
            return Finding("ok", f"the runtime folder is {folder.parent}")
    except OSError as error:
        return Finding("broken", f"no runtime folder: {error}", "set XDG_RUNTIME_DIR or TMPDIR to a folder of yours")
