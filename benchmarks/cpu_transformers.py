"""``generate`` of transformers on a CPU, beside ``cpu_runner.py``: ``python benchmarks/cpu_transformers.py FOLDER``.

FOLDER holds the same model as a checkpoint in bf16. Prints tokens a second of decodes (batches of 1 and 8 with 64
prompt tokens each) and of a 512-token prefill; the best of some rounds, since other processes disturb.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

PROMPT, DECODED, PREFILL = 64, 64, 512  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own choice")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16).eval()
    for batch in (1, 8):
        most = best_time(model, batch, PROMPT, DECODED, options.rounds)
        one = best_time(model, batch, PROMPT, 1, options.rounds)
        print(f"batch {batch}: {batch * (DECODED - 1) / (most - one):.0f} tok/s", flush=True)
    print(f"prefill of {PREFILL}: {PREFILL / best_time(model, 1, PREFILL, 1, options.rounds):.0f} tok/s")


def best_time(model: torch.nn.Module, batch: int, prompt: int, new: int, rounds: int) -> float:
    """Seconds of the fastest round; one more, the first, is not counted."""
    torch.manual_seed(0)
    ids = torch.randint(3, 10_000, (batch, prompt))
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        times.append(time.perf_counter() - start)
    return min(times[1:])


if __name__ == "__main__":
    main()
