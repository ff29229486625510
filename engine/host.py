"""What this process may use of the machine: cores, memory and files, control groups included. Written for Linux."""

import contextlib
import ctypes
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores of the affinity mask, or fewer when a control group's quota is smaller. At least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups("cpu") if (quota := _core_quota(group)) is not None]
    return max(1, min([affinity, *map(math.ceil, quotas)]))


def raise_file_limit() -> None:
    """Let us and our children, who inherit it, open all files we may: each connection is one, and shells set 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system that promises more than it gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def has_gpu() -> bool:
    """Whether the kernel shows an NVIDIA device; found without a driver call, which takes its time."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def available_memory() -> int:
    """Bytes that can be taken without swapping and without reaching a control group's limit."""
    rooms = [room for group in _groups("memory") if (room := _memory_room(group)) is not None]
    return max(0, min([_system_available(), *rooms]))


def give_memory_back() -> None:
    """What is free goes back to the system: glibc keeps what a large piece of work took, for the next one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _system_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _groups(controller: str) -> Iterator[Path]:
    """The folders that limit this process for ``controller``, innermost first; cgroup v1 and v2. Inside a container
    the path that the kernel names may not exist there; the walk then starts at the first parent that does."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        folder = root / path.lstrip("/")
        while folder != root.parent:
            yield folder
            folder = folder.parent


def _core_quota(group: Path) -> float | None:
    text = _read(group / "cpu.max")
    quota, period = text.split() if text else (_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))
    if not quota or not period or quota in ("max", "-1"):
        return None
    return int(quota) / int(period)


def _memory_room(group: Path) -> int | None:
    for limit_file, usage_file, idle_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read(group / limit_file), _read(group / usage_file)
        if limit and usage and limit != "max":
            # Files read once, such as a checkpoint, count as used and are given back when somebody needs the memory.
            numbers = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            return int(limit) - int(usage) + int(numbers.get(idle_name, 0))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
