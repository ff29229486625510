"""``radixserve bench``: the benchmarks that a user can repeat, each a module with ``run(arguments)``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from radixserve.engine.errors import ConfigError

BENCHMARKS = {
    "serve": "load on a running server: tokens/s, TTFT and time between chunks",
    "prefix": "requests that share long prefixes, without a server: cached tokens, time, TTFT",
    "offline": "many requests at once, without a server: tokens/s",
    "latency": "one request at a time, without a server: ms a token",
}


def run(arguments: Sequence[str]) -> int:
    match list(arguments):
        case [] | ["-h" | "--help", *_]:
            print("usage: radixserve bench NAME [options]\n\nbenchmarks:")
            print("\n".join(f"  {name:<10} {summary}" for name, summary in BENCHMARKS.items()))
            return 0
        case [name, *rest] if name in BENCHMARKS:
            status: int = import_module(f"radixserve.server.bench.{name}").run(rest)
            return status
        case [name, *_]:
            raise ConfigError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    raise AssertionError("unreachable")
