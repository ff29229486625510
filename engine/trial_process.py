"""The process in which grammars are compiled first, ``python -m radixserve.engine.trial_process``: see ``trials``.

Its standard input is a socket to the engine: a ``TrialSetup`` comes, then one grammar at a time, each answered when its
compilation has ended, by why it is too complex or by nothing. One with an error is not told from a good one: the engine
finds it as quickly. It loads no torch: a tenth of the time, a quarter of the memory.
"""

import importlib
import os
import re
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from radixserve.engine import lifeline
from radixserve.engine.compiling import TOO_COMPLEX, Compiler
from radixserve.engine.errors import InvalidRequest
from radixserve.engine.trials import EXIT_OUT_OF_MEMORY, TrialSetup

_CACHE_BYTES = 64 << 20  # of parts that grammars share, as in the engine
# Most of a compilation are the masks. They take 20 to 60 times as long as what comes before them, but for expressions,
# where 80 characters may cost minutes, and for what is counted in numbers.
_UNBOUNDED = re.compile('"(regex|grammar|pattern|patternProperties|minProperties|maxProperties|multipleOf)"')
_QUICK_S = 0.01


def main() -> None:
    lifeline.end_with_parent(signal.SIGKILL)
    _load_without_torch()
    pipe = Connection(sys.stdin.fileno())
    setup = msgspec.msgpack.decode(pipe.recv_bytes(), type=TrialSetup)
    compiler = Compiler(setup.vocabulary, setup.eos_token_ids, _CACHE_BYTES)
    if setup.memory_bytes is not None:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = num_pages * resource.getpagesize() + setup.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while True:
        try:
            grammar = pipe.recv_bytes().decode()
        except EOFError:
            return
        # The kernel keeps the limit, whatever the compiler does: SIGPROF ends a process that does not handle it.
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
        try:
            answer = _try(compiler, grammar)
        except MemoryError:
            os._exit(EXIT_OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(answer.encode())


def _try(compiler: Compiler, grammar: str) -> str:
    """Why it is too complex, or nothing."""
    began = time.process_time()
    try:
        compiler.outline(grammar)
        if _UNBOUNDED.search(grammar) or time.process_time() - began > _QUICK_S:
            compiler.compile(grammar)
    except InvalidRequest as error:
        return error.message if error.code == TOO_COMPLEX else ""
    return ""


class _Unused(ModuleType):
    """Stands for a library whose names xgrammar mentions but needs only for what is not called here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **options: None})


def _load_without_torch() -> None:
    """Load xgrammar, without what it loads of its own accord."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # xgrammar's bindings use it only if it is there
    importlib.import_module("tvm_ffi")
    sys.modules |= {name: _Unused(name) for name in ("torch", "transformers")}
    importlib.import_module("xgrammar")


if __name__ == "__main__":
    main()
