"""A rank of tensor parallelism other than 0, ``python -m radixserve.engine.follower``: started by rank 0, see ``team``.

Its standard input brings the configuration, then the plans to execute, and ends with rank 0. Exit status 3: the model
or the configuration is wrong, starting again would not help. 1: a crash.
"""

import faulthandler
import gc
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from radixserve.engine import lifeline
from radixserve.engine.errors import ConfigError, ModelError
from radixserve.engine.logs import log_to_stderr
from radixserve.engine.sharding import Shard
from radixserve.engine.step import PendingStep, Runner
from radixserve.engine.team import MEETING_VARIABLE, RANK_VARIABLE, Frame, Launch, Sample, frame_decoder

_STDIN_FD = 0
_PATIENCE_S = 1.0
_log = logging.getLogger("radixserve.engine")


def main() -> int:
    """Load this rank's part of the model and execute what comes. Returns the exit status."""
    config = lifeline.read_config()
    rank, meeting = int(os.environ[RANK_VARIABLE]), Path(os.environ[MEETING_VARIABLE])
    frames = _receive(meeting)
    log_to_stderr(config.log_level, config.log_format)
    faulthandler.enable()
    try:
        from radixserve.engine.build import build_follower  # late: it loads torch, and the pipe is watched by now

        runner = build_follower(config, Shard(rank, config.tensor_parallel_size), meeting)
        gc.collect()
        gc.freeze()
        follow(runner, frames)
    except (ModelError, ConfigError) as error:
        _log.error("rank %d: %s", rank, error)
        return lifeline.EXIT_HOPELESS
    except Exception:
        time.sleep(_PATIENCE_S)  # most often another rank is gone: rank 0 says which, and we end with it
        _log.exception("rank %d failed", rank)
    return 1


def follow(runner: Runner, frames: Iterable[Frame]) -> None:
    """Execute ``frames``. Nobody asks for results: rank 0 has the same."""
    step: PendingStep | None = None
    for frame in frames:
        match frame:
            case Launch(plan):
                step = runner.launch(plan)
            case Sample(num_masks, words):
                assert step is not None, "a plan comes before its masks"
                step.sample(words.reshape(num_masks, -1))


def _receive(meeting: Path) -> Iterator[Frame]:
    """What rank 0 sends from now on. A thread reads it, so that this process also leaves when the other end is closed
    while a collective waits for ranks that are gone."""
    pipe = os.dup(_STDIN_FD)
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), _STDIN_FD)  # no child (a compiler, ...) may eat frames
    queue: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        connection = Connection(pipe, writable=False)
        try:
            while True:
                queue.put(connection.recv_bytes())
        except (EOFError, OSError):
            shutil.rmtree(meeting, ignore_errors=True)  # rank 0 may have had no time for it
            os._exit(0)

    threading.Thread(target=read, name="frames", daemon=True).start()
    decoder = frame_decoder()
    return (decoder.decode(frame) for frame in iter(queue.get, None))


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    os._exit(exit_status)  # taking the collectives down in order would need the other ranks
