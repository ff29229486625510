"""Perplexity of the default model by type of weights on a CPU: ``python benchmarks/perplexity.py``.

The text: the docstrings of the standard library's modules in a fixed order, the first 20,480 tokens. Windows of 512
tokens are scored one by one, in chunks of ``--chunk`` tokens: few and many tokens take different ways through the
kernels.
"""

from __future__ import annotations

import argparse
import ast
import math
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
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    options = parser.parse_args()
    print("| weights | chunk | tokens | perplexity |\n|---|---|---|---|")
    for weights in options.weights:
        value = perplexity(weights, options.chunk, options.threads, options.tokens)
        print(f"| {weights} | {options.chunk} | {options.tokens} | {value:.4f} |", flush=True)


def perplexity(weights: str, chunk: int, threads: int | None, num_tokens: int) -> float:
    with LLM(
        device="cpu",
        cpu_weights=weights,
        cpu_threads=threads,
        max_num_batched_tokens=chunk,
        disable_radix_cache=True,
        max_model_len=2 * WINDOW,
    ) as llm:
        ids = token_ids()[:num_tokens]
        assert len(ids) == num_tokens, "the standard library's docstrings are too short"
        total, count = 0.0, 0
        for first in range(0, num_tokens, WINDOW):
            window = ids[first : first + WINDOW]
            (completion,) = llm.generate([window], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
            assert completion.prompt_logprobs is not None
            known = [entry.logprob for entry in completion.prompt_logprobs if entry is not None]
            total, count = total - sum(known), count + len(known)
        return math.exp(total / count)


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
