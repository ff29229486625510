"""Speed of the engine without a server on the CPU, by type of weights: ``python benchmarks/cpu_runner.py``.

Prints tokens a second of decodes (1, 8 and 32 requests that run together, 64 prompt tokens each) and of a 2,048-token
prefill; the best of some rounds, since other processes disturb.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from radixserve.engine.llm import LLM
from radixserve.engine.sampling_params import SamplingParams

DECODED = 32  # tokens a request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=None, help="default: the usable cores")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| type | 1 request, tok/s | 8 | 32 | prefill, tok/s |")
    print("|---|---|---|---|---|")
    for dtype in options.dtypes:
        with LLM(dtype=dtype, device="cpu", cpu_threads=options.threads, disable_radix_cache=True) as llm:
            decodes = [f"{decode_rate(llm, count, options.rounds):.0f}" for count in (1, 8, 32)]
            print(f"| {dtype} | {' | '.join(decodes)} | {prefill_rate(llm, options.rounds):.0f} |", flush=True)


def decode_rate(llm: LLM, num_requests: int, rounds: int) -> float:
    """Decoded tokens a second: the time of a run with more tokens less that of one with a single token."""
    prompts = random_prompts(num_requests, 64)
    return (
        num_requests * (DECODED - 1) / (best_time(llm, prompts, DECODED, rounds) - best_time(llm, prompts, 1, rounds))
    )


def prefill_rate(llm: LLM, rounds: int) -> float:
    return 2048 / best_time(llm, random_prompts(1, 2048), 1, rounds)


def best_time(llm: LLM, prompts: list[list[int]], max_tokens: int, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        times.append(time.perf_counter() - start)
    return min(times)


def random_prompts(count: int, length: int) -> list[list[int]]:
    ids: list[list[int]] = np.random.default_rng(0).integers(3, 10_000, (count, length)).tolist()
    return ids


if __name__ == "__main__":
    main()
