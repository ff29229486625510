"""``radixserve bench``: the benchmarks that a user can repeat."""

from __future__ import annotations

from collections.abc import Sequence

from radixserve.engine.errors import ConfigError
from radixserve.server.bench import engine, serve
from radixserve.server.commands.parser import Parser

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
        case ["serve", *rest]:
            return serve.run(rest)
        case [name, *rest] if name in BENCHMARKS:
            return engine.run(name, rest)
        case [name, *_]:
            raise ConfigError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    raise AssertionError("unreachable")


def build_parser(name: str) -> Parser:
    return serve.build_parser() if name == "serve" else engine.build_parser(name)
