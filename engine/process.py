"""The engine process, ``python -m radixserve.engine.process``: started by the supervisor, see ``lifeline``.

Exit status 3: the model or the configuration is wrong, starting again would not help. 1: a crash.
"""

import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Callable

from radixserve.configs.schema import ServeConfig
from radixserve.engine import lifeline
from radixserve.engine.built import BuiltEngine, new_scheduler
from radixserve.engine.errors import ConfigError, ModelError
from radixserve.engine.frontends import Frontends
from radixserve.engine.loading import answering, explained_lack_of_memory, shown_progress
from radixserve.engine.logs import announce, log_to_stderr
from radixserve.engine.loop import EngineLoop
from radixserve.engine.messages import EngineStatus

# Threads of CPU kernels meet some hundred times a step. When a frontend or anybody else takes a core, one that spins
# at a barrier burns the time slice of the thread it waits for; one that sleeps is woken at once. Measured with both
# cores busy: a decode step's linear layers in 50 ms instead of 180 to 820 ms (benchmarks/notes/cpu_threads.md).
_OPENMP_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
# oneDNN keeps code for each shape that it has multiplied: for 1,024 of them, half a MiB each, unless told otherwise.
# These are enough for the batch sizes of a while.
_ONEDNN_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}

log = logging.getLogger("radixserve.engine")

Build = Callable[[ServeConfig, Callable[[str, float], None]], BuiltEngine]


def main() -> int:
    """Take the configuration from the lifeline, load, serve. Returns the exit status."""
    config = lifeline.read_config()
    lifeline.watch()
    log_to_stderr(config.log_level, config.log_format)
    faulthandler.enable()  # where it was, when native code or the watchdog (SIGABRT) ends it
    return serve(config, os.environ[lifeline.IPC_VARIABLE], _build)


def serve(config: ServeConfig, address: str, build: Build) -> int:
    """Load with ``build`` and serve the frontends at ``address`` for ever; returns when the model cannot be loaded."""
    frontends = Frontends(address)
    try:
        with answering(frontends) as progress:
            built = build(config, progress)
            scheduler = new_scheduler(built, config)
    except (ModelError, ConfigError) as error:
        log.error("%s", error)
        frontends.tell_all(EngineStatus(os.getpid(), "failed", str(error)))
        frontends.close()
        return lifeline.EXIT_HOPELESS
    ready_lines = _ready_lines(built.description, os.environ.get(lifeline.URL_VARIABLE), has_page=config.page != "off")
    announce(config.log_format, "\n  ".join(ready_lines))
    # The model's objects stay for good: leave them out of every later garbage collection.
    gc.collect()
    gc.freeze()
    EngineLoop(frontends, scheduler, built).run()
    return 0


def _ready_lines(description: str, url: str | None, *, has_page: bool) -> list[str]:
    """What people are told when they can begin: what was built, and how to use it."""
    lines = ["radixserve is ready", *description.split("; ")]
    if url is not None:
        lines += [f"page at {url}/"] if has_page else []
        body = '{"messages": [{"role": "user", "content": "Hello"}]}'
        lines.append(f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    return lines


def _build(config: ServeConfig, progress: Callable[[str, float], None]) -> BuiltEngine:
    for name, value in {**_OPENMP_ENVIRONMENT, **_ONEDNN_ENVIRONMENT}.items():
        os.environ.setdefault(name, value)  # read once, when torch loads these libraries
    from radixserve.engine.build import build_engine  # late: it loads torch, which takes seconds

    with explained_lack_of_memory(config.model), shown_progress(log.info) as show:

        def report(what: str, share: float) -> None:
            progress(what, share)
            show(what, share)

        return build_engine(config, report, _leave)


def _leave(reason: str, status: int) -> None:
    """Another rank is gone, and this thread may be stuck for want of it: the supervisor starts all anew."""
    log.error("%s", reason)
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
