"""Shows frontends what the engine does, while they ask for it. No torch."""

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from radixserve.engine.observation import (
    INTERVAL_S,
    LEASE_S,
    MAX_CHUNKS,
    MAX_REQUESTS,
    MAX_STEPS,
    EngineView,
    SeenRequest,
    SeenStep,
)
from radixserve.engine.request import Request
from radixserve.engine.scheduler import Scheduler
from radixserve.engine.step import StepPlan
from radixserve.kvcache.manager import CacheManager
from radixserve.kvcache.watch import TreeWatch


class EngineWatch:
    """Owns who watches, and what they have not been shown yet. While nobody does, nothing is taken down."""

    def __init__(self, scheduler: Scheduler, cache: CacheManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._clock = clock
        self._lease_ends: dict[bytes, float] = {}  # by frontend
        self._tree: TreeWatch | None = None
        self._steps: deque[SeenStep] = deque(maxlen=MAX_STEPS)
        self._next_at = 0.0

    @property
    def watched(self) -> bool:
        return self._tree is not None

    def renew(self, frontend: bytes, *, anew: bool) -> None:
        """``frontend`` watches for another ``LEASE_S``. ``anew``: it knows nothing yet."""
        self._lease_ends[frontend] = self._clock() + LEASE_S
        if self._tree is None:
            self._tree = TreeWatch(self._clock)
            self._cache.observe(self._tree)
        elif anew:
            self._tree.tell_anew()

    def planned(self, plan: StepPlan) -> None:
        """``plan`` is the next step."""
        if self._tree is None:
            return
        chunks = [(self._cache.owner(c.row), c.start, len(c.token_ids)) for c in plan.chunks[:MAX_CHUNKS]]
        num_decodes = len(plan.decode_rows)
        self._steps.append(SeenStep(plan.step, self._clock(), num_decodes, plan.num_tokens - num_decodes, chunks))

    def take(self) -> tuple[list[bytes], EngineView] | None:
        """Who is to be shown what, if it is time."""
        now = self._clock()
        if self._tree is None or now < self._next_at:
            return None
        self._next_at = now + INTERVAL_S
        self._lease_ends = {frontend: end for frontend, end in self._lease_ends.items() if end > now}
        if not self._lease_ends:
            self._tree = None
            self._cache.observe(None)
            self._steps.clear()
            return None
        tree, events = self._tree.take()
        steps = list(self._steps)
        self._steps.clear()
        requests = [_seen(request, now) for request in islice(self._scheduler.requests, MAX_REQUESTS)]
        return list(self._lease_ends), EngineView(now, self._cache.page_size, tree, events, steps, requests)


def _seen(request: Request, now: float) -> SeenRequest:
    state = "waiting" if request.lease is None else "prefill" if not request.output else "decode"
    return SeenRequest(
        id=request.submit.request_id,
        state=state,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached_tokens,
        computed_tokens=min(request.computed, request.prompt_len),
        output_tokens=len(request.output),
        age_s=now - request.arrived_at,
    )
