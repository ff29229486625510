"""Compiles ``native/step.cpp`` and its headers for this processor, once, and calls it.

The library lies beside the sources when it was built at installation (``python -m radixserve.kernels.native_library``
builds it there for every x86 level, for images that run elsewhere), else in the user's cache, where the first start
puts it. Its name holds the level and a hash of the sources, so that an old one is never taken for a new one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

_SOURCES = Path(__file__).with_name("native")
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp", "-w")
_COMPILE_SECONDS = 300
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


class NativeUnavailable(Exception):
    """The library cannot be had here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions: what the compiler is told, and what /proc/cpuinfo must list."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: tuple[str, ...]


X86_LEVELS = (
    Level(
        "amx",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
    ),
    Level("avx512bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), (*_AVX512, "avx512_vnni", "avx512_bf16")),
    Level("avx512", ("-march=x86-64-v4", "-mavx512vnni"), (*_AVX512, "avx512_vnni")),
    Level("avx2", ("-march=x86-64-v3",), ("avx2", "fma", "f16c", "bmi2")),
)
PLAIN = Level("plain", (), ())
_Pulse = ctypes.CFUNCTYPE(None)


def _fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    return [(name, kind) for name in names.split()]


class Op(ctypes.Structure):
    """One operation of a step, see ``native/interface.h``. Pointers are addresses; fields that are not given are 0."""

    _fields_ = [
        *_fields(ctypes.c_int32, "kind weight_kind epilogue cache_bf16"),
        *_fields(ctypes.c_int64, "rows cols"),
        *_fields(ctypes.c_void_p, "weight bias norm"),
        *_fields(ctypes.c_float, "eps"),
        *_fields(ctypes.c_int32, "rotary_dim"),
        *_fields(ctypes.c_void_p, "input output cos_sin q_norm k_norm k_cache v_cache"),
        *_fields(ctypes.c_int32, "q_heads kv_heads head_dim page_size"),
        *_fields(ctypes.c_float, "score_scale softcap"),
        *_fields(ctypes.c_int64, "window page_stride handed_on"),
    ]


class Step(ctypes.Structure):
    """The numbers of a step that operations share."""

    _fields_ = [
        ("tokens", ctypes.c_int64),
        ("sequences", ctypes.c_int64),
        ("ids", ctypes.c_void_p),  # int64 [tokens]
        ("positions", ctypes.c_void_p),  # int32 [tokens]
        ("slots", ctypes.c_void_p),  # int64 [tokens]
        ("rows", ctypes.c_void_p),  # int32 [sequences]
        ("kv_lens", ctypes.c_void_p),  # int32 [sequences]
        ("query_starts", ctypes.c_void_p),  # int32 [sequences + 1]
        ("page_table", ctypes.c_void_p),  # int32 [rows, table_stride]
        *_fields(ctypes.c_int64, "table_stride tiles tile_members"),
        *_fields(ctypes.c_void_p, "own_lens tile_lens members"),  # of ``SharedTiles``
    ]


def address(tensor: Tensor | None) -> int | None:
    """Of a contiguous tensor's first element; None for none."""
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()


class NativeLibrary:
    """The loaded library with its threads' scratch memory. Not for two steps at the same time. ``pulse`` is called some
    times a second while it runs, by the thread that waits for it; it must not raise."""

    def __init__(self, path: Path, level: str, num_threads: int, pulse: Callable[[], None] = lambda: None):
        self.level = level
        self._pulse = _Pulse(pulse)  # must outlive the engine
        # libgomp is the one that torch has loaded: same name, and one pool of threads.
        self._library = ctypes.CDLL(str(path))
        self._library.engine_new.restype = ctypes.c_void_p
        self._library.run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        self._engine = self._library.engine_new(num_threads, self._pulse)

    def run(self, ops: ctypes.Array[Op], step: Step) -> None:
        """Run ``ops`` in order. Everything they point to must be alive and of the promised size."""
        self._library.run(self._engine, ops, len(ops), ctypes.byref(step))

    def __del__(self) -> None:
        self._library.engine_free(ctypes.c_void_p(self._engine))


def load_native(num_threads: int, report: Callable[[str], None], pulse: Callable[[], None]) -> NativeLibrary:
    """Find the library or compile it, which takes some ten seconds. ``report`` is told before that; ``pulse`` as in
    ``NativeLibrary``. Raises ``NativeUnavailable``."""
    level = best_level(cpu_flags())
    path = next((path for path in _places(level) if path.exists()), None)
    if path is None:
        report("compiling CPU kernels")
        path = compile_native(level, _places(level)[-1])
    try:
        return NativeLibrary(path, level.name, num_threads, pulse)
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be loaded ({error}): delete it") from error


def compile_native(level: Level, path: Path) -> Path:
    """Compile for ``level`` into the file ``path``. Raises ``NativeUnavailable``."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler: install one (on Debian and Ubuntu: apt install g++)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = (compiler, *_FLAGS, *level.compiler_flags, str(_SOURCES / "step.cpp"), "-o", str(made))
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
            made.replace(path)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        raise NativeUnavailable(f"{compiler} cannot compile the CPU kernels ({lines[0]}): install g++ 12") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the CPU kernels cannot be compiled into {path.parent}: {error}") from error
    return path


def best_level(flags: frozenset[str]) -> Level:
    """The first level whose instructions are all among ``flags``."""
    return next((level for level in X86_LEVELS if flags.issuperset(level.cpu_flags)), PLAIN)


@cache
def cpu_flags() -> frozenset[str]:
    """What the processor can do, in the words of /proc/cpuinfo; nothing where that is not x86 Linux."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def _places(level: Level) -> Sequence[Path]:
    """Where the library may lie; it is compiled into the last."""
    digest = hashlib.sha256(" ".join((*_FLAGS, *level.compiler_flags)).encode())
    for source in (*sorted(_SOURCES.glob("*.h")), _SOURCES / "step.cpp"):
        digest.update(source.read_bytes())
    name = f"native-{level.name}-{digest.hexdigest()[:16]}.so"
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _SOURCES / name, Path(cache_home) / "radixserve" / name


def main() -> int:
    """Build beside the sources, for every level that machines of this kind may have. Needs a compiler; says if not."""
    levels = X86_LEVELS if platform.machine() in ("x86_64", "AMD64") else (PLAIN,)
    try:
        for level in levels:
            print(compile_native(level, _places(level)[0]))
    except NativeUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
