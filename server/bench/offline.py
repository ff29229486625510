"""``radixserve bench offline``: tokens a second of the engine alone, all requests submitted at once.

The default workload is that of the READMEs of nano-vllm and mini-SGLang: 256 requests, 100 to 1024 random tokens in and
out, temperature 0.6. Options of ``radixserve serve`` are understood as well.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence

import radixserve
from radixserve.engine.sampling_params import SamplingParams
from radixserve.server.bench.arguments import (
    engine_options,
    engine_parser,
    model_len,
    positive,
    random_ids,
    span,
    write_json,
)
from radixserve.server.commands.parser import Parser


def run(arguments: Sequence[str]) -> int:
    options, rest = build_parser().parse_known_args(arguments)
    rng = random.Random(options.seed)
    prompt_lens = [rng.randint(*options.input_len) for _ in range(options.requests)]
    output_lens = [rng.randint(*options.output_len) for _ in range(options.requests)]
    rules = [SamplingParams(temperature=options.temperature, ignore_eos=True, max_tokens=n) for n in output_lens]
    start = time.perf_counter()
    longest = model_len(options.input_len[1] + options.output_len[1])
    with radixserve.LLM(**engine_options(rest, max_model_len=longest, max_num_seqs=256)) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
        ready_s = time.perf_counter() - start
        print(llm.description)
        print(
            f"{options.requests} requests, {sum(prompt_lens)} tokens in, {sum(output_lens)} out; ready {ready_s:.1f} s"
        )
        seconds = []
        for number in range(options.rounds):
            prompts = [random_ids(rng, length) for length in prompt_lens]
            start = time.perf_counter()
            done = llm.generate(prompts, rules, show_progress=sys.stderr.isatty())
            seconds.append(time.perf_counter() - start)
            assert [len(completion.token_ids) for completion in done] == output_lens, "a request ended early"
            print(f"  round {number + 1}: {seconds[-1]:.3f} s, {sum(output_lens) / seconds[-1]:,.0f} tokens/s")
    facts = {
        "engine": llm.description,
        "requests": options.requests,
        "prompt_tokens": sum(prompt_lens),
        "generated_tokens": sum(output_lens),
        "ready_s": round(ready_s, 3),
        "seconds": [round(value, 4) for value in seconds],
        "tokens_per_s": [round(sum(output_lens) / value, 1) for value in seconds],
    }
    write_json(options.json, "offline", arguments, facts)
    return 0


def build_parser() -> Parser:
    parser = engine_parser("offline", __doc__)
    add = parser.add_argument
    add("--requests", type=positive, default=256, help="requests, all at once (default: %(default)s)")
    add("--input-len", type=span, default=(100, 1024), metavar="LOW:HIGH", help="prompt tokens (default: 100:1024)")
    add("--output-len", type=span, default=(100, 1024), metavar="LOW:HIGH", help="tokens out (default: 100:1024)")
    add("--temperature", type=float, default=0.6, help="(default: %(default)s)")
    add("--rounds", type=positive, default=2, help="timed rounds, with new prompts each (default: %(default)s)")
    return parser
