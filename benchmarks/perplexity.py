"""Perplexity of the default model by type of weights and of KV on a CPU: ``python benchmarks/perplexity.py``.

The text: the docstrings of the standard library's modules in a fixed order, the first 20,480 tokens. Windows of 512
tokens are scored one by one, in chunks of ``--chunk`` tokens: few and many tokens take different ways through the
kernels.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import statistics
import sysconfig
from pathlib import Path

from radixserve.configs.schema import ServeConfig
from radixserve.engine.llm import LLM
from radixserve.engine.model_files import resolve_model
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.text.text_model import load_text_model

NUM_TOKENS, WINDOW = 20_480, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", default=["fp32", "auto", "int8", "int4", "bf16"])
    parser.add_argument("--dtype", default="auto", help="beside --weights auto: of torch's kernels")
    parser.add_argument("--kv", nargs="+", default=["auto"], help="values of --kv-cache-dtype")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    options = parser.parse_args()
    print("| weights | KV | chunk | tokens | perplexity | mean difference of a logprob from the first row |")
    print("|---|---|---|---|---|---|")
    first = None
    for weights, kv in itertools.product(options.weights, options.kv):
        llm_options = {"cpu_weights": weights, "dtype": options.dtype, "kv_cache_dtype": kv}
        found = logprobs(options.chunk, options.threads, options.tokens, llm_options)
        first = found if first is None else first
        difference = statistics.fmean(abs(ours - theirs) for ours, theirs in zip(found, first, strict=True))
        perplexity = math.exp(-statistics.fmean(found))
        print(
            f"| {weights} | {kv} | {options.chunk} | {options.tokens} | {perplexity:.4f} | {difference:.5f} |",
            flush=True,
        )


def logprobs(chunk: int, threads: int | None, num_tokens: int, options: dict[str, str]) -> list[float]:
    """Of all tokens but the first of each window."""
    with LLM(
        device="cpu",
        cpu_threads=threads,
        max_num_batched_tokens=chunk,
        disable_radix_cache=True,
        max_model_len=2 * WINDOW,
        **options,
    ) as llm:
        ids = token_ids()[:num_tokens]
        assert len(ids) == num_tokens, "the standard library's docstrings are too short"
        found: list[float] = []
        for first in range(0, num_tokens, WINDOW):
            window = ids[first : first + WINDOW]
            (completion,) = llm.generate([window], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
            assert completion.prompt_logprobs is not None
            found += [entry.logprob for entry in completion.prompt_logprobs if entry is not None]
        return found


def token_ids() -> list[int]:
    config = ServeConfig()
    return load_text_model(resolve_model(config.model, config.load_format), config).encode_prompt(text())


def text() -> str:
    """Docstrings of modules, classes and functions; what else a file holds is no prose."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node)):
                found.append(doc)
    return "\n\n".join(found)


if __name__ == "__main__":
    main()
