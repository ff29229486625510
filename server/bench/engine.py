"""``radixserve bench offline``, ``latency`` and ``prefix``: the engine alone, without a server."""

from __future__ import annotations

import argparse
import inspect
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import radixserve
from radixserve.engine.sampling_params import SamplingParams
from radixserve.server.bench.arguments import output_file, positive, span, write_json
from radixserve.server.bench.report import check_plot, percentile, plot_spread, table
from radixserve.server.commands.parser import Parser
from radixserve.server.commands.serve import parse_flags, read_config

Facts = dict[str, Any]

_MODEL_LEN = 4096
_VOCAB = 10_000  # random ids lie below, where any model has ids


def run(name: str, arguments: Sequence[str]) -> int:
    options, served = build_parser(name).parse_known_args(arguments)
    given = read_config(parse_flags(served), os.environ).model_dump(exclude_unset=True)
    write_json(options.json, name, arguments, _benchmark(name)(options, given))
    return 0


def _benchmark(name: str) -> Callable[[argparse.Namespace, Facts], Facts]:
    """What measures, tells what it finds, and returns the figures; its docstring is for users."""
    return {"offline": _offline, "latency": _latency, "prefix": _prefix}[name]


def build_parser(name: str) -> Parser:
    description = f"{inspect.getdoc(_benchmark(name))}\n\nOptions of `radixserve serve` are understood as well."
    parser = Parser(prog=f"radixserve bench {name}", description=description)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the workload (default: %(default)s)")
    add("--json", type=output_file, metavar="FILE", help="write the figures there as well")
    rounds = 5 if name == "latency" else 2
    add("--rounds", type=positive, default=rounds, help="timed rounds, with new prompts each (default: %(default)s)")
    if name == "offline":
        add("--requests", type=positive, default=256, help="requests, all at once (default: %(default)s)")
        add("--input-len", type=span, default=(100, 1024), metavar="LOW:HIGH", help="prompt tokens (default: 100:1024)")
        add("--output-len", type=span, default=(100, 1024), metavar="LOW:HIGH", help="tokens out (default: 100:1024)")
        add("--temperature", type=float, default=0.6, help="(default: %(default)s)")
        add("--top-k", type=int, default=0, help="tokens to draw from (default: all)")
        add("--top-p", type=float, default=1.0, help="their share of the probability (default: %(default)s)")
    elif name == "latency":
        add("--input-len", type=positive, default=128, metavar="N", help="prompt tokens (default: %(default)s)")
        add("--output-len", type=positive, default=257, metavar="N", help="tokens out, greedy (default: %(default)s)")
    else:
        add("--prefixes", type=positive, default=64, help="different prefixes (default: %(default)s)")
        add("--requests", type=positive, default=16, dest="size", help="requests of each prefix (default: %(default)s)")
        add("--prefix-len", type=positive, default=2048, metavar="N", help="tokens of a prefix (default: %(default)s)")
        add("--own-len", type=positive, default=128, metavar="N", help="tokens behind it (default: %(default)s)")
        add("--output-len", type=positive, default=64, metavar="N", help="tokens out, greedy (default: %(default)s)")
        add("--plot", type=output_file, metavar="FILE", help="draw the times to first tokens: .png, .svg or .pdf")
        naive = argparse.BooleanOptionalAction
        add("--naive", action=naive, default=True, help="compare with a cache that keeps nothing")
    return parser


# ---- what the benchmarks share ----


@contextmanager
def _warm_engine(given: Facts, longest: int, **defaults: Any) -> Iterator[tuple[radixserve.LLM, Facts]]:
    """The engine for requests of up to ``longest`` tokens, and what to tell of it. Loading shows how far it is."""
    start = time.perf_counter()
    defaults |= {"show_progress": True, "max_model_len": max(_MODEL_LEN, longest)}
    with radixserve.LLM(**{**defaults, **given}) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
        ready_s = time.perf_counter() - start
        print(f"{llm.description}; ready after {ready_s:.1f} s", flush=True)
        yield llm, {"engine": llm.description, "ready_s": round(ready_s, 3)}


def _timed(
    llm: radixserve.LLM, prompts: list[list[int]], rules: SamplingParams | list[SamplingParams]
) -> tuple[list[Any], float]:
    """The completions, and the seconds that they took."""
    began = time.perf_counter()
    done = llm.generate(prompts, rules, show_progress=len(prompts) > 1 and sys.stderr.isatty())
    return done, time.perf_counter() - began


def _random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCAB) for _ in range(count)]


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)


# ---- the benchmarks ----


def _offline(options: argparse.Namespace, given: Facts) -> Facts:
    """Tokens a second of the engine alone, all requests submitted at once.

    The default workload is that of the READMEs of nano-vllm and mini-SGLang: 256 requests, 100 to 1024 random tokens in
    and out, temperature 0.6.
    """
    rng = random.Random(options.seed)
    prompt_lens = [rng.randint(*options.input_len) for _ in range(options.requests)]
    output_lens = [rng.randint(*options.output_len) for _ in range(options.requests)]
    filters = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    rules = [SamplingParams(**filters, ignore_eos=True, max_tokens=n) for n in output_lens]
    longest = options.input_len[1] + options.output_len[1]
    seconds = []
    with _warm_engine(given, longest, max_num_seqs=256) as (llm, facts):
        print(f"{options.requests} requests, {sum(prompt_lens)} tokens in, {sum(output_lens)} out")
        for number in range(options.rounds):
            prompts = [_random_ids(rng, length) for length in prompt_lens]
            done, took_s = _timed(llm, prompts, rules)
            assert [len(completion.token_ids) for completion in done] == output_lens, "a request ended early"
            seconds.append(took_s)
            print(f"  round {number + 1}: {took_s:.3f} s, {sum(output_lens) / took_s:,.0f} tokens/s", flush=True)
    return facts | {
        "requests": options.requests,
        "prompt_tokens": sum(prompt_lens),
        "generated_tokens": sum(output_lens),
        "seconds": [round(value, 4) for value in seconds],
        "tokens_per_s": [round(sum(output_lens) / value, 1) for value in seconds],
    }


def _latency(options: argparse.Namespace, given: Facts) -> Facts:
    """Milliseconds a token of the engine alone, one request at a time."""
    rng = random.Random(options.seed)
    with _warm_engine(given, options.input_len + options.output_len) as (llm, facts):

        def milliseconds(num_tokens: int) -> float:
            _, seconds = _timed(llm, [_random_ids(rng, options.input_len)], _greedy(num_tokens))
            return 1e3 * seconds

        milliseconds(options.output_len)
        whole_ms = [milliseconds(options.output_len) for _ in range(options.rounds)]
        first_ms = [milliseconds(1) for _ in range(options.rounds)]
    first, whole = statistics.median(first_ms), statistics.median(whole_ms)
    between = (whole - first) / max(1, options.output_len - 1)
    print(f"{options.input_len} tokens in, {options.output_len} out, median of {options.rounds}")
    print(f"  whole request      {whole:9.2f} ms, {whole / options.output_len:.3f} ms a token")
    print(f"  first token        {first:9.2f} ms")
    print(f"  each further token {between:9.3f} ms")
    return facts | {
        "prompt_tokens": options.input_len,
        "generated_tokens": options.output_len,
        "request_ms": [round(value, 3) for value in whole_ms],
        "ms_per_token": round(whole / options.output_len, 4),
        "first_token_ms": round(first, 3),
        "ms_per_further_token": round(between, 4),
    }


def _prefix(options: argparse.Namespace, given: Facts) -> Facts:
    """Requests that share long prefixes, all submitted at once, with the engine alone.

    By default 64 prefixes of 2,048 random tokens, 16 requests of each with 128 tokens of their own, shuffled; greedy,
    64 tokens each. Measured without the radix cache (unless --no-naive) and with it.
    """
    check_plot(options.plot)
    found: dict[str, Facts] = {}
    ttfts: dict[str, list[float]] = {}
    if options.naive and "disable_radix_cache" not in given:
        # In a process of its own, so that the memory comes back for certain.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            naive = pool.submit(_measure_cache, options, given | {"disable_radix_cache": True})
            found["naive"], ttfts["naive cache"] = naive.result()
    name = "naive" if given.get("disable_radix_cache") else "radix"
    found[name], ttfts[f"{name} cache"] = _measure_cache(options, given)
    # When each prefix is computed once.
    ideal = {"ideal_cached_tokens": options.prefixes * (options.size - 1) * options.prefix_len}
    columns = {f"{name} {i}": one | ideal for name, facts in found.items() for i, one in enumerate(facts["rounds"], 1)}
    print(f"\n{table(columns)}")
    if options.plot:
        plot_spread(options.plot, {"first token": ttfts})
    names = ("prefixes", "size", "prefix_len", "own_len", "output_len", "rounds", "seed")
    return {name: getattr(options, name) for name in names} | ideal | found


def _measure_cache(options: argparse.Namespace, given: Facts) -> tuple[Facts, list[float]]:
    """Figures of each round with one kind of cache, and its times to first tokens in ms. Each round has new prompts, so
    none finds those of another."""
    rng = random.Random(options.seed)
    rounds: list[dict[str, float]] = []
    all_ttfts: list[float] = []
    print(f"{'naive' if given.get('disable_radix_cache') else 'radix'} cache:")
    longest = options.prefix_len + options.own_len + options.output_len
    with _warm_engine(given, longest, max_num_seqs=256) as (llm, facts):
        for number in range(options.rounds):
            prompts = _shared_prompts(options, rng)
            done, seconds = _timed(llm, prompts, _greedy(options.output_len))
            print(f"  round {number + 1}: {seconds:.3f} s", flush=True)
            ttfts = sorted(1e3 * completion.ttft_s for completion in done)
            all_ttfts += ttfts
            figures = {
                "seconds": round(seconds, 4),
                "cached_tokens": sum(completion.cached_tokens for completion in done),
                "prompt_tokens": sum(map(len, prompts)),
                "ttft_p50_ms": round(percentile(ttfts, 0.50), 2),
                "ttft_p99_ms": round(percentile(ttfts, 0.99), 2),
            }
            rounds.append(figures)
    return facts | {"rounds": rounds}, all_ttfts


def _shared_prompts(options: argparse.Namespace, rng: random.Random) -> list[list[int]]:
    prompts = []
    for _ in range(options.prefixes):
        prefix = _random_ids(rng, options.prefix_len)
        prompts += [prefix + _random_ids(rng, options.own_len) for _ in range(options.size)]
    rng.shuffle(prompts)
    return prompts
