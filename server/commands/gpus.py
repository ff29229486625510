"""What the NVIDIA driver tells about its devices, without loading torch."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

_FIELDS = "index,name,driver_version,memory.total,memory.free"


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    driver: str
    total_bytes: int
    free_bytes: int


def find_gpus() -> list[Gpu]:
    """One entry a device; empty without a driver, or with one that does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        query = [command, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
        table = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return [parse_gpu(line) for line in table.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def parse_gpu(line: str) -> Gpu:
    """A line of ``nvidia-smi --query-gpu``; memory there is in MiB."""
    index, name, driver, total, free = (part.strip() for part in line.split(","))
    return Gpu(int(index), name, driver, int(total) << 20, int(free) << 20)
