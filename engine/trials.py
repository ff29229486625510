"""Grammars are compiled in a process of their own first, which can be killed: what a user sends may take the compiler
for ever, take all memory or crash it. What came to an end there may be compiled in the engine.

Compiled again, since to bring a compiled grammar over takes as long or longer: xgrammar writes masks that many places
share once for each (docs/structured_output.md has figures). No torch.
"""

import os
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from radixserve.engine.compiling import TOO_COMPLEX
from radixserve.engine.errors import InvalidRequest, RadixServeError

TRIAL_CPU_S = 10.0  # what one grammar may cost
TRIAL_TIMEOUT_S = 60.0  # and how long it may take on a busy machine
TRIAL_MEMORY_BYTES = 1 << 30
EXIT_OUT_OF_MEMORY = 4

_COMMAND = (sys.executable, "-P", "-m", "radixserve.engine.trial_process")
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}  # of numpy, which is not asked for products
_MAX_FAULTS = 64
_SIMPLER = "make the schema or grammar simpler"
_CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


class TrialSetup(msgspec.Struct, frozen=True):
    """What a process is told first. ``memory_bytes``: None where the system cannot limit them."""

    vocabulary: list[bytes]
    eos_token_ids: list[int]
    cpu_s: float = TRIAL_CPU_S
    memory_bytes: int | None = TRIAL_MEMORY_BYTES if sys.platform == "linux" else None


class GrammarTrials:
    """Owns the processes, as many as there are threads that try a grammar at once, and what was refused."""

    def __init__(self, setup: TrialSetup, timeout_s: float = TRIAL_TIMEOUT_S):
        self._setup = setup
        self._timeout_s = timeout_s
        self._faults: OrderedDict[str, str] = OrderedDict()  # what need not be tried again
        self._idle = [_TrialProcess(setup)]  # it starts while the engine loads the library

    def check(self, grammar: str) -> None:
        """Return if the engine may compile ``grammar``, which may have errors. Raises ``InvalidRequest`` if it takes
        too much time or memory or crashes the compiler."""
        fault = self._faults.get(grammar) or self._try(grammar)
        if not fault:
            return
        self._faults[grammar] = fault
        if len(self._faults) > _MAX_FAULTS:
            self._faults.popitem(last=False)
        raise _refusal(fault)

    def close(self) -> None:
        """End the processes that are idle; another ``check`` starts one anew."""
        while self._idle:
            self._idle.pop().end()

    def _try(self, grammar: str) -> str:
        """What is wrong with it, or nothing."""
        outcome: str | int = 0
        for _ in range(2):  # that somebody killed the process is not the grammar's fault
            try:
                process = self._idle.pop()
            except IndexError:
                process = _TrialProcess(self._setup)
            try:
                outcome = process.try_to_compile(grammar, self._timeout_s)
            except TimeoutError as error:  # the machine's fault, perhaps
                raise _refusal(f"takes more than {self._timeout_s:g} s to compile: {_SIMPLER}") from error
            if isinstance(outcome, str):
                self._idle.append(process)
                return outcome
            if fault := self._fault(outcome):
                return f"{fault}: {_SIMPLER}"
        raise RadixServeError(
            f"the process that tries grammars ended with exit status {outcome}, twice: try again later"
        )

    def _fault(self, status: int) -> str | None:
        """What is wrong with a grammar whose trial ended with that exit status, if anything is."""
        if status == -signal.SIGPROF:
            return f"takes more than {self._setup.cpu_s:g} s to compile"
        if status == EXIT_OUT_OF_MEMORY:
            return f"takes more than {(self._setup.memory_bytes or 0) >> 20} MiB of memory to compile"
        return f"crashes the compiler (signal {-status})" if -status in _CRASHES else None


class _TrialProcess:
    """Owns one process and the socket to it. The process ends with this object, with the engine (the socket's end, and
    on Linux the kernel sees to it), and by itself when a grammar has used its time."""

    def __init__(self, setup: TrialSetup):
        self._untold: TrialSetup | None = setup
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=theirs.fileno(),
                env={**os.environ, **_ENVIRONMENT},
                process_group=0,  # Ctrl-C in a terminal is for the engine
            )
        self.end = weakref.finalize(self, _end, self._process, self._pipe)

    def try_to_compile(self, grammar: str, timeout_s: float) -> str | int:
        """The answer of the process, or the exit status if it is gone. Raises ``TimeoutError`` when there is neither,
        and ends the process."""
        try:
            if self._untold is not None:
                self._pipe.send_bytes(msgspec.msgpack.encode(self._untold))
                self._untold = None
            self._pipe.send_bytes(grammar.encode())
            if not self._pipe.poll(timeout_s):
                self.end()
                raise TimeoutError
            return self._pipe.recv_bytes().decode()
        except (EOFError, ConnectionError):
            return self._process.wait()


def _refusal(fault: str) -> InvalidRequest:
    return InvalidRequest(fault, param="grammar", code=TOO_COMPLEX)


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()
