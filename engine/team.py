"""Rank 0's side of tensor parallelism: it starts the other ranks, has them execute its plans, and sees them die.

All ranks run the same steps of the same plans and draw the same tokens, so a plan is all that is ever sent. It goes
through a pipe, the standard input of a follower (see ``follower``), which ends with rank 0. No torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from radixserve.configs.schema import ServeConfig
from radixserve.engine.errors import ConfigError, EngineLost, RadixServeError
from radixserve.engine.lifeline import EXIT_HOPELESS
from radixserve.engine.step import Int32s, PendingStep, Runner, StepPlan, StepResult

# Environment of a follower.
RANK_VARIABLE = "RADIXSERVE_RANK"
MEETING_VARIABLE = "RADIXSERVE_MEETING"  # private folder where the ranks find each other

_FOLLOWER = (sys.executable, "-P", "-m", "radixserve.engine.follower")
_POLL_S = 0.02
_LEAVE_S = 5.0  # from the end of its pipe to SIGKILL
# A collective fails as soon as another rank's connection ends, a little before that rank can be waited for. Longer than
# a follower whose collective failed so waits before it ends, too.
_EXPLANATION_S = 2.0

_log = logging.getLogger(__name__)

# Called once, with why the team is lost and with the exit status that says whether to start it again. By any thread,
# and while the caller of a step hangs in a collective.
OnLoss = Callable[[str, int], None]


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Execute ``plan``."""

    plan: StepPlan


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Choose the tokens of the last plan, see ``PendingStep.sample``. ``words``: all of ``num_masks`` masks."""

    num_masks: int
    words: Int32s


Frame = Launch | Sample


def encode(frame: Frame) -> bytes:
    return msgspec.msgpack.encode(frame, enc_hook=_as_bytes)


def frame_decoder() -> msgspec.msgpack.Decoder[Frame]:
    return msgspec.msgpack.Decoder(Frame, dec_hook=_as_int32s)


def _as_bytes(array: Any) -> bytes:
    assert isinstance(array, np.ndarray) and array.dtype == np.int32
    return array.tobytes()


def _as_int32s(kind: Any, data: bytes) -> Int32s:
    return np.frombuffer(data, np.int32).copy()  # torch wants arrays that may be written to


@dataclass(frozen=True, slots=True)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection


class Team:
    """Owns the processes of the other ranks, their pipes, and the folder where all meet."""

    def __init__(self, followers: list[_Follower], meeting: Path, on_loss: OnLoss):
        self.meeting = meeting
        self._followers = followers
        self._on_loss = on_loss
        self._ended = threading.Lock()  # taken by whoever ends the team, for good
        self._lost = threading.Event()
        self._reason = ("", 0)

    @classmethod
    def start(cls, config: ServeConfig, on_loss: OnLoss) -> Team:
        """Start the followers of ``config``, which begin to load torch."""
        meeting = Path(tempfile.mkdtemp(prefix="radixserve-ranks-"))
        ranks = range(1, config.tensor_parallel_size)
        team = cls([_start(rank, config, meeting) for rank in ranks], meeting, on_loss)
        for follower in team._followers:
            threading.Thread(target=team._watch, args=(follower,), name="follower", daemon=True).start()
        return team

    def wait_ready(self) -> None:
        """Until all followers are about to meet."""
        while not all((self.meeting / str(follower.rank)).exists() for follower in self._followers):
            self._check()
            time.sleep(_POLL_S)

    def send(self, frame: bytes) -> None:
        """To all followers."""
        self._check()
        for follower in self._followers:
            follower.pipe.send_bytes(frame)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Scope in which all ranks load. If that fails, the team ends; what another rank died of goes before what rank
        0 saw of it."""
        try:
            yield
        except BaseException as error:
            expected = isinstance(error, RadixServeError) or not isinstance(error, Exception)
            is_lost = not expected and self._lost.wait(_EXPLANATION_S)
            self.close()
            if is_lost:
                raise self._error() from error
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """Scope of what all ranks do for a step. An error that only rank 0 has leaves them out of step for ever: then,
        and when another rank is gone, raises ``EngineLost``."""
        try:
            yield
        except RadixServeError:
            raise
        except Exception as error:
            if not self._lost.wait(_EXPLANATION_S):
                _log.exception("rank 0 failed")
                self._lose(f"rank 0 failed: {error}", 1)
            raise self._error() from error

    def close(self) -> None:
        """End all followers."""
        self._ended.acquire(blocking=False)
        for follower in self._followers:
            follower.pipe.close()
        for follower in self._followers:
            try:
                follower.process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        shutil.rmtree(self.meeting, ignore_errors=True)

    def _check(self) -> None:
        if self._lost.is_set():
            raise self._error()

    def _error(self) -> RadixServeError:
        reason, status = self._reason
        return ConfigError(reason) if status == EXIT_HOPELESS else EngineLost(reason)

    def _watch(self, follower: _Follower) -> None:
        status = follower.process.wait()
        if status == EXIT_HOPELESS:
            self._lose(f"rank {follower.rank} cannot run (its error is above)", status)
        else:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
            self._lose(f"rank {follower.rank} (process {follower.process.pid}) {how}", 1)

    def _lose(self, reason: str, status: int) -> None:
        if not self._ended.acquire(blocking=False):
            return
        self._reason = (reason, status)
        shutil.rmtree(self.meeting, ignore_errors=True)
        try:
            self._on_loss(reason, status)  # first, for it may end the process before anybody complains
        finally:
            self._lost.set()


def _start(rank: int, config: ServeConfig, meeting: Path) -> _Follower:
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            _FOLLOWER,
            stdin=reader,
            env={**os.environ, RANK_VARIABLE: str(rank), MEETING_VARIABLE: str(meeting)},
            process_group=0,  # Ctrl-C in a terminal is for rank 0
        )
    finally:
        os.close(reader)
    with contextlib.suppress(BrokenPipeError), open(writer, "wb", closefd=False) as pipe:
        pipe.write(config.to_private_json().encode() + b"\n")
    return _Follower(rank, process, Connection(writer, readable=False))


class TeamRunner:
    """The ``Runner`` of rank 0: what it launches, the followers of ``team`` launch too."""

    def __init__(self, runner: Runner, team: Team):
        self._runner = runner
        self._team = team

    def launch(self, plan: StepPlan) -> PendingStep:
        frame = encode(Launch(plan))
        with self._team.together():
            self._team.send(frame)
            return _TeamStep(self._runner.launch(plan), self._team)


class _TeamStep:
    def __init__(self, step: PendingStep, team: Team):
        self._step = step
        self._team = team

    def sample(self, masks: Int32s) -> None:
        frame = encode(Sample(len(masks), masks))
        with self._team.together():
            self._team.send(frame)
            self._step.sample(masks)

    def result(self) -> StepResult:
        with self._team.together():
            return self._step.result()
