"""How many prompt tokens may join a step that also decodes, so that streams stay smooth. No torch."""

from collections import deque
from collections.abc import Callable
from statistics import median

from radixserve.engine.step import StepPlan

# The median of so many last steps of a kind tells what one takes: one that was held up does not count.
_STEPS = 8
# Prompt tokens that a step may always have. What a token costs is not learned from steps with fewer, which are mostly
# overhead.
_LEAST_TOKENS = 256


class PrefillPace:
    """Measures steps and says how much of a prompt the next one may compute, so that a step with decodes takes
    ``target_s`` at most (None: whatever it takes), or half again as long as the decodes by themselves."""

    def __init__(self, target_s: float | None, clock: Callable[[], float]) -> None:
        self._target_s = target_s
        self._clock = clock
        self._planned_at: deque[float] = deque()  # of the steps in flight
        self._completed_at = 0.0
        self._decode_s: deque[float] = deque(maxlen=_STEPS)  # steps of decodes alone
        self._token_s: deque[float] = deque(maxlen=_STEPS)  # a prompt token, by steps with many

    def limit(self, num_tokens: int) -> int:
        """Prompt tokens for a step with decodes whose budget leaves ``num_tokens`` for them."""
        if self._target_s is None or not self._token_s:
            return num_tokens
        decode_s = self._decode_time()
        left_s = max(self._target_s - decode_s, decode_s / 2)
        token_s = median(self._token_s)
        if num_tokens * token_s <= left_s:  # prompts that took no longer than decodes by themselves count as free
            return num_tokens
        return min(num_tokens, max(_LEAST_TOKENS, int(left_s / token_s)))

    def planned(self) -> None:
        """A step is planned and will be launched at once."""
        self._planned_at.append(self._clock())

    def completed(self, plan: StepPlan) -> None:
        """``plan``, the oldest in flight, is done. It began when it was planned or the one before it was done."""
        now = self._clock()
        seconds = now - max(self._completed_at, self._planned_at.popleft())
        self._completed_at = now
        num_prompt_tokens = plan.num_tokens - len(plan.decode_rows)
        if not num_prompt_tokens:
            self._decode_s.append(seconds)
        elif num_prompt_tokens >= _LEAST_TOKENS:
            decode_s = self._decode_time() if len(plan.decode_rows) else 0.0
            self._token_s.append(max(0.0, seconds - decode_s) / num_prompt_tokens)

    def _decode_time(self) -> float:
        return median(self._decode_s) if self._decode_s else 0.0
