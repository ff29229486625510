"""The supervisor's order to drain, on its way to whoever serves."""

from __future__ import annotations

import os
from collections.abc import Callable


class Orders:
    """Called in the lifeline's thread. Before anybody serves there is nothing to drain: the process leaves at once."""

    def __init__(self) -> None:
        self._drain: Callable[[float], None] | None = None

    def attach(self, drain: Callable[[float], None]) -> None:
        """From now on ``drain`` is called with the seconds that running requests get."""
        self._drain = drain

    def __call__(self, seconds: float) -> None:
        if self._drain is None:
            os._exit(0)
        self._drain(seconds)
