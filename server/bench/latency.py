"""``radixserve bench latency``: milliseconds a token of the engine alone, one request at a time.

Options of ``radixserve serve`` are understood as well.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from tqdm import tqdm  # type: ignore[import-untyped]

import radixserve
from radixserve.engine.sampling_params import SamplingParams
from radixserve.server.bench.arguments import engine_options, engine_parser, model_len, positive, random_ids, write_json
from radixserve.server.commands.parser import Parser


def run(arguments: Sequence[str]) -> int:
    options, rest = build_parser().parse_known_args(arguments)
    rng = random.Random(options.seed)
    start = time.perf_counter()
    with radixserve.LLM(**engine_options(rest, max_model_len=model_len(options.input_len + options.output_len))) as llm:

        def seconds(num_tokens: int) -> float:
            prompt = random_ids(rng, options.input_len)
            began = time.perf_counter()
            llm.generate(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens))
            return time.perf_counter() - began

        seconds(1)
        ready_s = time.perf_counter() - start
        seconds(options.output_len)
        rounds = range(options.rounds)
        whole_s = [seconds(options.output_len) for _ in tqdm(rounds, "whole requests", leave=False, disable=None)]
        first_s = [seconds(1) for _ in tqdm(rounds, "first tokens", leave=False, disable=None)]
    first, whole = statistics.median(first_s), statistics.median(whole_s)
    per_token = whole / options.output_len
    between = (whole - first) / max(1, options.output_len - 1)
    print(llm.description)
    print(f"{options.input_len} tokens in, {options.output_len} out, median of {options.rounds}; ready {ready_s:.1f} s")
    print(f"  whole request      {1e3 * whole:9.2f} ms, {1e3 * per_token:.3f} ms a token")
    print(f"  first token        {1e3 * first:9.2f} ms")
    print(f"  each further token {1e3 * between:9.3f} ms")
    facts = {
        "engine": llm.description,
        "prompt_tokens": options.input_len,
        "generated_tokens": options.output_len,
        "ready_s": round(ready_s, 3),
        "request_ms": [round(1e3 * value, 3) for value in whole_s],
        "ms_per_token": round(1e3 * per_token, 4),
        "first_token_ms": round(1e3 * first, 3),
        "ms_per_further_token": round(1e3 * between, 4),
    }
    write_json(options.json, "latency", arguments, facts)
    return 0


def build_parser() -> Parser:
    parser = engine_parser("latency", __doc__)
    add = parser.add_argument
    add("--input-len", type=positive, default=128, metavar="N", help="prompt tokens (default: %(default)s)")
    add("--output-len", type=positive, default=257, metavar="N", help="tokens out, greedy (default: %(default)s)")
    add("--rounds", type=positive, default=5, help="timed requests, after one to warm up (default: %(default)s)")
    return parser
