"""How the prompts that are being computed share a step. Pure functions, no torch."""

from __future__ import annotations

from collections.abc import Sequence

# Prompts that may be unfinished at the same time when the step's budget is spent already. Enough that a short prompt
# passes a burst of long ones, few enough that most prompts find what earlier ones left in the prefix cache.
MAX_UNFINISHED = 8


def decode_limit(num_rows: int, step_tokens: int) -> int:
    """Requests that may run at once, so that a step of ``step_tokens`` holds all decodes and leaves at least a
    quarter of itself to prefill."""
    return min(num_rows, max(1, step_tokens - step_tokens // 4))


def share_budget(unfinished: Sequence[int], budget: int) -> list[int]:
    """Divide ``budget`` tokens among prompts, given the tokens each still needs, the oldest prompt first.

    The oldest gets half, so that it always advances; the others get the rest, shortest first, so that a short prompt
    never waits for the end of a long one; what they leave goes to the oldest. No prompt gets more than it needs, and
    budget remains only when all are satisfied.
    """
    shares = [0] * len(unfinished)
    if not unfinished:
        return shares
    shares[0] = min(unfinished[0], (budget + 1) // 2)
    left = budget - shares[0]
    for index in sorted(range(1, len(unfinished)), key=unfinished.__getitem__):
        shares[index] = min(unfinished[index], left)
        left -= shares[index]
    shares[0] += min(unfinished[0] - shares[0], left)
    return shares
