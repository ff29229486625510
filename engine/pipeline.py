"""Keeps the runner busy: plans, launches and completes steps, with or without overlap. No torch."""

import logging
from collections import deque
from collections.abc import Callable

from radixserve.engine.errors import EngineLost
from radixserve.engine.scheduler import Scheduler
from radixserve.engine.step import PendingStep, Runner, StepPlan

_log = logging.getLogger(__name__)

# A device that fails so many steps on end will not recover (a CUDA error stays): the process has to be replaced.
MAX_FAILED_STEPS_ON_END = 3


class StepPipeline:
    """Owns the steps in flight. With ``overlap`` the next step is planned and launched while the device runs the last
    one, whose tokens are taken in after that; without, each step is completed before the next is planned. ``on_plan``
    is told each step."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool,
        on_plan: Callable[[StepPlan], None] = lambda plan: None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._max_in_flight = 1 if overlap else 0  # when ``advance`` returns
        self._in_flight: deque[tuple[StepPlan, PendingStep | Exception]] = deque()  # with why a launch failed
        self._on_plan = on_plan
        self._failed_on_end = 0

    def advance(self) -> bool:
        """Launch the next step if there is one, and complete the oldest if it is time. False: there is nothing to do.

        An exception of a step ends the requests of that step; it is raised when the device keeps failing or is lost.
        """
        plan = self._scheduler.schedule()
        if plan is not None:
            self._on_plan(plan)
            self._in_flight.append((plan, self._launch(plan)))
        elif not self._in_flight:
            return False
        if plan is None or len(self._in_flight) > self._max_in_flight:
            self._complete(*self._in_flight.popleft())
        return True

    def _launch(self, plan: StepPlan) -> PendingStep | Exception:
        """The step, or an error, which is reported in turn, after the steps before it. A step with masks also chooses
        its tokens, while the device still computes it: what they may be depends on the tokens of the steps before."""
        try:
            launched = self._runner.launch(plan)
        except Exception as error:
            return error
        if plan.masked:
            while self._in_flight:
                self._complete(*self._in_flight.popleft())
            try:
                launched.sample(self._scheduler.masks(plan))
            except Exception as error:
                return error
        return launched

    def _complete(self, plan: StepPlan, pending: PendingStep | Exception) -> None:
        try:
            if isinstance(pending, Exception):
                raise pending
            result = pending.result()
        except Exception as error:
            self._failed_on_end += 1
            _log.exception("step %d failed", plan.step)
            self._scheduler.fail(plan, "the engine failed while it computed this request; the server's log says why")
            if self._failed_on_end >= MAX_FAILED_STEPS_ON_END or isinstance(error, EngineLost):
                raise
            return
        self._failed_on_end = 0
        self._scheduler.complete(plan, result)
