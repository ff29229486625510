"""``python -m radixserve.server.worker``: one frontend process, which serves on the listening socket it inherits.

It obeys the lifeline before it imports what it serves with. That takes a second or more, in which people who started
the wrong model press Ctrl-C.
"""

from __future__ import annotations

import sys

from radixserve.engine import lifeline
from radixserve.engine.logs import log_to_stderr
from radixserve.server.orders import Orders


def main() -> int:
    """Take the configuration from the lifeline, serve until it says to leave. Returns the exit status."""
    config = lifeline.read_config()
    log_to_stderr(config.log_level, config.log_format)
    orders = Orders()
    lifeline.watch(on_drain=orders)
    from radixserve.server.serving import serve

    return serve(config, orders)


if __name__ == "__main__":
    sys.exit(main())
