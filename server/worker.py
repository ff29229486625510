"""``python -m radixserve.server.worker``: one frontend process, which serves on the listening socket it inherits.

It obeys the lifeline before it imports what it serves with. That takes a second or more, in which people who started
the wrong model press Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from radixserve.engine import lifeline
from radixserve.engine.logs import log_to_stderr


class Orders:
    """The supervisor's order to drain, on its way to whoever serves. Called in the lifeline's thread. Before anybody
    serves there is nothing to drain: the process leaves at once."""

    def __init__(self) -> None:
        self._drain: Callable[[float], object] = lambda _: os._exit(0)

    def attach(self, drain: Callable[[float], object]) -> None:
        """From now on ``drain`` is called with the seconds that running requests get."""
        self._drain = drain

    def __call__(self, seconds: float) -> None:
        self._drain(seconds)


def main() -> int:
    """Take the configuration from the lifeline, serve until it says to leave. Returns the exit status."""
    config = lifeline.read_config()
    log_to_stderr(config.log_level, config.log_format)
    orders = Orders()
    lifeline.watch(on_drain=orders)
    from radixserve.server.serving import serve

    return serve(config, orders.attach)


if __name__ == "__main__":
    sys.exit(main())
