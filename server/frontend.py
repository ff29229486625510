"""The state of one frontend process: its engine client, the model's text side, and whether it takes requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from radixserve.configs.schema import ServeConfig
from radixserve.engine.errors import InvalidRequest, RadixServeError
from radixserve.engine.host import give_memory_back
from radixserve.engine.messages import EngineStatus
from radixserve.engine.model_files import resolve_model
from radixserve.engine.text.text_model import TextModel, load_text_model
from radixserve.server.engine_client import FAILED, EngineClient, Health
from radixserve.server.errors import RequestFailed
from radixserve.server.metrics import WorkerNumbers
from radixserve.server.output.formats import OutputFormats, output_formats

log = logging.getLogger("radixserve.server")

Result = TypeVar("Result")

# Work on less than this many bytes takes less time than handing it to a thread.
INLINE_BYTES = 4096
_TEXT_THREADS = 2
# Tokenizing takes some seventy times as much memory as the text, for a moment.
_LARGE_BYTES = 1 << 20
# After the drain's end, how long clients get to take the final error events.
_FAREWELL_S = 2.0
_PUBLISH_S = 1.0


class Frontend:
    """One per process, on ``app.state``. The text side is loaded in a thread after start, and may take its time."""

    def __init__(self, config: ServeConfig, client: EngineClient, worker_numbers: WorkerNumbers):
        self.config = config
        self.client = client
        self.worker_numbers = worker_numbers
        self.model_names = served_names(config)
        self.created = int(time.time())
        self.num_active = 0  # POST requests inside; counted by the gate
        self.draining = False
        self._text: TextModel | None = None
        self.sampling_defaults: Mapping[str, float] = {}  # what the model's authors recommend for absent fields
        self.failed = asyncio.Event()  # the text side cannot be loaded; the log says why
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text")

    async def start(self) -> None:
        self.client.start()
        self._loading = asyncio.create_task(self._load())
        self._publishing = asyncio.create_task(self._publish())

    async def close(self) -> None:
        self._loading.cancel()
        self._publishing.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.client.close()

    async def _load(self) -> None:
        try:
            text = await self._in_thread(lambda: _load_text(self.config))
            defaults = asdict(text.sampling_defaults).items()
            self.sampling_defaults = {name: value for name, value in defaults if value is not None}
            self._text = text
        except RadixServeError as error:
            log.error("%s", error)
            self.failed.set()
        except Exception:
            log.exception("loading the tokenizer failed")
            self.failed.set()

    async def _publish(self) -> None:
        """Let the other workers know our numbers, if there are any."""
        while self.config.api_workers != 1:
            await asyncio.sleep(_PUBLISH_S)
            self.worker_numbers.publish()

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and return when none is left; after ``seconds`` those that still run are failed."""
        self.draining = True
        await self._wait_idle(seconds)
        if self.num_active:
            log.warning("%d requests still run after %g s: they are aborted", self.num_active, seconds)
            self.client.requests.fail_all(RequestFailed("the server was shut down", code="draining"))
            await self._wait_idle(_FAREWELL_S)

    async def _wait_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.num_active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # ---- what routes need ----

    def health(self) -> Health:
        if self.draining:
            return Health("draining", "the server is shutting down")
        if self.failed.is_set():
            return Health("failed", FAILED)
        health = self.client.health()
        if health.ok and self._text is None:
            return Health("loading", "the tokenizer is loading")
        return health

    def ready_status(self) -> EngineStatus:
        """The engine's, with what it knows of the model; raises ``RequestFailed`` unless requests can be served now."""
        health = self.health()
        if not health.ok:
            message = f"the server is {health.status}: {health.reason}"
            raise RequestFailed(message, code=f"engine_{health.status}", retry_after_s=2)
        assert self.client.status is not None
        return self.client.status

    @property
    def text(self) -> TextModel:
        """Raises ``RequestFailed`` until it is loaded."""
        if self._text is None:
            raise RequestFailed("the tokenizer is loading", code="engine_loading", retry_after_s=1)
        return self._text

    @cached_property
    def output_formats(self) -> OutputFormats:
        """Raises ``RequestFailed`` until the text side is loaded."""
        return output_formats(self.text, self.config)

    def check_model(self, name: str | None) -> str:
        """The name to answer with: the asked for one if it is served, the first without one."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise InvalidRequest(
                f"model: {name!r} is not served here; served: {served}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return name

    async def offload(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Do ``work`` on ``num_bytes`` of input, in a thread if it is too much for the event loop."""
        if num_bytes < INLINE_BYTES:
            return work()
        return await self._in_thread(work if num_bytes < _LARGE_BYTES else partial(_and_give_back, work))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _and_give_back(work: Callable[[], Result]) -> Result:
    try:
        return work()
    finally:
        give_memory_back()


def _load_text(config: ServeConfig) -> TextModel:
    """Raises ``ModelError``."""
    return load_text_model(resolve_model(config.model, config.load_format), config)


def served_names(config: ServeConfig) -> tuple[str, ...]:
    """The configured names, or the model's own; of a local path only the last part, for the rest concerns nobody."""
    if config.served_model_name:
        return config.served_model_name
    path = Path(config.model).expanduser()
    if not path.exists():
        return (config.model,)
    return (path.resolve().stem if path.is_file() else path.resolve().name,)
