"""The way of a request into the scheduler, past the compilation of its grammar. No torch."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from radixserve.engine.constraint import ConstraintSource, TokenConstraint
from radixserve.engine.errors import InvalidRequest
from radixserve.engine.messages import TOKEN_BYTES, FinishReason, Outputs, Rejected, Submit, ToFrontend, TokenEvent
from radixserve.engine.request import overloaded
from radixserve.engine.scheduler import Scheduler

COMPILE_TIMEOUT_S = 90.0  # how long a request may wait for its grammar; a trial ends before
_THREADS = 2
_NICENESS = 5
_MAX_COMPILING = 256  # requests

Sender = tuple[bytes, Submit]  # a frontend and its request


@dataclass(slots=True)
class _Job:
    """A grammar that is being compiled, and who waits for it."""

    deadline: float
    future: Future[TokenConstraint]
    senders: list[Sender] = field(default_factory=list)


class Intake:
    """Owns the requests whose grammar is being compiled: they wait here, in nobody's way, and go to the scheduler then.

    Threads compile with the lowest claim to a core that is needed for a model on the CPU.
    """

    def __init__(
        self, scheduler: Scheduler, grammars: ConstraintSource, *, timeout_s: float = COMPILE_TIMEOUT_S
    ) -> None:
        self._scheduler = scheduler
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, "grammar", initializer=_step_back)
        self._aborted: list[Sender] = []  # to be told
        self._jobs: dict[str, _Job] = {}  # by grammar: those who ask for the same share it

    @property
    def num_compiling(self) -> int:
        """Requests that wait for a grammar."""
        return sum(len(job.senders) for job in self._jobs.values())

    def submit(self, frontend: bytes, submit: Submit) -> Rejected | None:
        """Accept a request (None), or say why not."""
        if len(submit.prompt_ids) % TOKEN_BYTES:
            message = f"malformed request: {len(submit.prompt_ids)} bytes are no whole tokens"
            return Rejected(submit.uid, message, code="malformed", param="prompt")
        grammar = submit.sampling.grammar
        constraint = None if grammar is None else self._grammars.cached(grammar)
        if grammar is None or constraint is not None:
            return self._scheduler.submit(frontend, submit, constraint)
        if self.num_compiling >= _MAX_COMPILING:
            return overloaded(submit.uid, f"{self.num_compiling} requests wait for their grammar already")
        job = self._jobs.get(grammar)
        if job is None:
            future = self._threads.submit(self._grammars.compile, grammar)
            job = self._jobs[grammar] = _Job(time.monotonic() + self._timeout_s, future)
        job.senders.append((frontend, submit))
        return None

    def advance(self) -> list[tuple[bytes, ToFrontend]]:
        """Hand what is compiled to the scheduler; returns what to tell which frontend."""
        aborted, self._aborted = self._aborted, []
        news: list[tuple[bytes, ToFrontend]] = [
            (frontend, Outputs([TokenEvent(submit.uid, [], FinishReason.ABORT)])) for frontend, submit in aborted
        ]
        now = time.monotonic()
        over = {grammar: job for grammar, job in self._jobs.items() if job.future.done() or now > job.deadline}
        for grammar in over:
            del self._jobs[grammar]
        for grammar, job in over.items():
            news += self._end(grammar, job)
        return news

    def _end(self, grammar: str, job: _Job) -> Iterator[tuple[bytes, ToFrontend]]:
        job.future.cancel()  # if it has not begun
        for frontend, submit in job.senders:
            rejected = self._refusal(submit, job.future)
            if rejected is None:
                constraint = self._grammars.cached(grammar) or job.future.result()
                rejected = self._scheduler.submit(frontend, submit, constraint)
            if rejected is not None:
                yield frontend, rejected

    def _refusal(self, submit: Submit, future: Future[TokenConstraint]) -> Rejected | None:
        if future.cancelled():  # it has never begun
            return overloaded(submit.uid, "others compile their grammars", status=503)
        if not future.done():
            message = f"takes more than {self._timeout_s:g} s to compile: make the schema or grammar simpler"
            return Rejected(submit.uid, message, code="grammar_too_complex", param="grammar")
        match future.exception():
            case None:
                return None
            case InvalidRequest(message=message, code=code, param=param):
                return Rejected(submit.uid, message, code=code, param=param)
            case error:
                message = f"the grammar could not be compiled: {error}"
                return Rejected(submit.uid, message, code="grammar_failed", param="grammar", status=500)

    # ---- ends ----

    def abort(self, frontend: bytes, uid: int) -> None:
        """As the scheduler's, and so are the next two."""
        self._abort(lambda sender: sender[0] == frontend and sender[1].uid == uid)
        self._scheduler.abort(frontend, uid)

    def abort_request(self, request_id: str) -> None:
        self._abort(lambda sender: request_id in ("", sender[1].request_id))
        self._scheduler.abort_request(request_id)

    def forget_frontend(self, frontend: bytes) -> None:
        self._abort(lambda sender: sender[0] == frontend)
        self._aborted = [sender for sender in self._aborted if sender[0] != frontend]
        self._scheduler.forget_frontend(frontend)

    def _abort(self, concerns: Callable[[Sender], bool]) -> None:
        for job in self._jobs.values():
            self._aborted += filter(concerns, job.senders)
            job.senders = [sender for sender in job.senders if not concerns(sender)]


def _step_back() -> None:
    """Threads have a niceness of their own on Linux; elsewhere this would be the process's."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
