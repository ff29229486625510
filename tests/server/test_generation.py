"""Generations apart from HTTP."""

import asyncio
import contextlib
import gc
import weakref
from typing import cast

from radixserve.server.engine_client import EngineClient
from radixserve.server.generation import Generation


def test_a_generation_whose_client_has_left_is_forgotten_at_once() -> None:
    async def leave_early() -> weakref.ref[Generation]:
        generation = Generation(cast(EngineClient, None), [], streaming=True)
        waiting = asyncio.create_task(generation.wait(1000))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        return weakref.ref(generation)

    async def run() -> None:
        left = await leave_early()
        await asyncio.sleep(0.01)  # the loop itself holds the cancellation for a turn
        gc.collect()
        assert left() is None

    asyncio.run(run())
