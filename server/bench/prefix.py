"""``radixserve bench prefix``: requests that share long prefixes, all submitted at once, with the engine alone.

By default 64 prefixes of 2,048 random tokens, 16 requests of each with 128 tokens of their own, shuffled; greedy, 64
tokens each. Measured without the radix cache (unless --no-naive) and with it. Options of ``radixserve serve`` are
understood as well.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import radixserve
from radixserve.engine.sampling_params import SamplingParams
from radixserve.server.bench.arguments import (
    engine_options,
    engine_parser,
    model_len,
    output_file,
    positive,
    random_ids,
    write_json,
)
from radixserve.server.bench.plot import check_plot, plot_spread
from radixserve.server.bench.report import percentile, table
from radixserve.server.commands.parser import Parser


def run(arguments: Sequence[str]) -> int:
    options, rest = build_parser().parse_known_args(arguments)
    check_plot(options.plot)
    longest = options.prefix_len + options.own_len + options.output_len
    engine = engine_options(rest, max_model_len=model_len(longest), max_num_seqs=256)
    results: dict[str, _Measured] = {}
    if options.naive and "disable_radix_cache" not in engine:
        # In a process of its own, so that the memory comes back for certain.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            results["naive"] = pool.submit(_measure, engine | {"disable_radix_cache": True}, options).result()
    results["naive" if engine.get("disable_radix_cache") else "radix"] = _measure(engine, options)
    ideal = {"ideal_cached_tokens": _ideal_cached(options)}
    columns = {f"{name} {i}": one | ideal for name, found in results.items() for i, one in enumerate(found.rounds, 1)}
    print(f"\n{table(columns)}")
    if options.plot:
        plot_spread(options.plot, {"first token": {f"{name} cache": found.ttfts for name, found in results.items()}})
    caches = {name: {"engine": found.engine, "rounds": found.rounds} for name, found in results.items()}
    names = ("prefixes", "size", "prefix_len", "own_len", "output_len", "rounds", "seed")
    workload = {name: getattr(options, name) for name in names}
    write_json(options.json, "prefix", arguments, {**workload, **ideal, **caches})
    return 0


def _ideal_cached(options: argparse.Namespace) -> int:
    """Prompt tokens found in the cache when each prefix is computed once."""
    return int(options.prefixes * (options.size - 1) * options.prefix_len)


def _prompts(options: argparse.Namespace, rng: random.Random) -> list[list[int]]:
    prompts = []
    for _ in range(options.prefixes):
        prefix = random_ids(rng, options.prefix_len)
        prompts += [prefix + random_ids(rng, options.own_len) for _ in range(options.size)]
    rng.shuffle(prompts)
    return prompts


@dataclass(frozen=True)
class _Measured:
    """Of one cache. ``ttfts``: of all rounds, ms."""

    engine: str
    rounds: list[dict[str, float]]
    ttfts: list[float]


def _measure(engine: dict[str, Any], options: argparse.Namespace) -> _Measured:
    """Time, cached tokens and TTFT of each round; each has new prompts, so none finds those of another."""
    rng = random.Random(options.seed)
    rule = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=options.output_len)
    rounds: list[dict[str, float]] = []
    all_ttfts: list[float] = []
    with radixserve.LLM(**engine) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
        print(f"{'naive' if engine.get('disable_radix_cache') else 'radix'} cache: {llm.description}")
        for number in range(options.rounds):
            prompts = _prompts(options, rng)
            began = time.perf_counter()
            done = llm.generate(prompts, rule, show_progress=sys.stderr.isatty())
            seconds = time.perf_counter() - began
            ttfts = sorted(1e3 * completion.ttft_s for completion in done)
            all_ttfts += ttfts
            rounds.append(
                {
                    "seconds": round(seconds, 4),
                    "cached_tokens": sum(completion.cached_tokens for completion in done),
                    "prompt_tokens": sum(map(len, prompts)),
                    "ttft_p50_ms": round(percentile(ttfts, 0.50), 2),
                    "ttft_p99_ms": round(percentile(ttfts, 0.99), 2),
                }
            )
            print(f"  round {number + 1}: {seconds:.3f} s", flush=True)
    return _Measured(llm.description, rounds, all_ttfts)


def build_parser() -> Parser:
    parser = engine_parser("prefix", __doc__)
    add = parser.add_argument
    add("--prefixes", type=positive, default=64, help="different prefixes (default: %(default)s)")
    add("--requests", type=positive, default=16, dest="size", help="requests of each prefix (default: %(default)s)")
    add("--prefix-len", type=positive, default=2048, metavar="N", help="tokens of a prefix (default: %(default)s)")
    add("--own-len", type=positive, default=128, metavar="N", help="tokens behind it (default: %(default)s)")
    add("--output-len", type=positive, default=64, metavar="N", help="tokens out, greedy (default: %(default)s)")
    add("--rounds", type=positive, default=2, help="timed rounds, with new prompts each (default: %(default)s)")
    add("--plot", type=output_file, metavar="FILE", help="draw the times to first tokens: .png, .svg or .pdf")
    add("--naive", action=argparse.BooleanOptionalAction, default=True, help="compare with a cache that keeps nothing")
    return parser
