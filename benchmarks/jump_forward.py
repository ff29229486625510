"""What grammars cost, and what appending forced text at once saves: ``python benchmarks/jump_forward.py``.

The engine without a server, in turn without a grammar, with masks alone, and with masks and jumps, so that what else
the machine does hits all; medians of some rounds, in processor time. Two answers: a record with long names of
properties (without a grammar: as many tokens as it has with jumps), and letters, where nothing is ever forced.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from radixserve.configs.schema import ServeConfig
from radixserve.engine.build import build_engine
from radixserve.engine.built import BuiltEngine, new_scheduler
from radixserve.engine.constraint import TokenConstraint
from radixserve.engine.messages import Outputs, Submit
from radixserve.engine.model_files import resolve_model
from radixserve.engine.pipeline import StepPipeline
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.step import Int32s
from radixserve.engine.structured import json_schema, regex, structural_tag
from radixserve.engine.text.text_model import load_text_model

FRONTEND = b"benchmark"
PROMPT = "A customer record as JSON:"
RECORD = {
    "customer_identification_number": {"enum": [40321, 77125]},
    "preferred_delivery_address": {"enum": ["home", "office", "pick-up station"]},
    "is_returning_customer": {"type": "boolean"},
    "number_of_previous_orders": {"enum": [0, 1, 2, 3]},
    "subscribed_to_newsletter": {"type": "boolean"},
}
SCHEMA = {"type": "object", "properties": RECORD, "required": list(RECORD)}
LETTERS = "[A-Za-z ]+"
NUM_LETTER_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Run:
    """Requests that ran together: sums, but for ``steps``. ``grammar_us``: processor time of masks and of looking for
    forced text, for each sampled token."""

    cpu_s: float
    wall_s: float
    tokens: int
    steps: int
    grammar_us: float = 0.0

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


class Watched:
    """A constraint whose time is taken. Unless ``jumps`` it does not tell what it forces."""

    def __init__(self, inner: TokenConstraint, *, jumps: bool) -> None:
        self._inner = inner
        self._jumps = jumps
        self.spent_s = 0.0
        self.num_masks = 0

    def fill_mask(self, words: Int32s) -> None:
        before = time.thread_time()
        self._inner.fill_mask(words)
        self.spent_s += time.thread_time() - before
        self.num_masks += 1

    def accept(self, token_id: int) -> bool:
        return self._inner.accept(token_id)

    def forced(self) -> list[int]:
        if not self._jumps:
            return []
        before = time.thread_time()
        found = self._inner.forced()
        self.spent_s += time.thread_time() - before
        return found


class Bench:
    """One engine; each run leaves it idle, with the prompt in the prefix cache."""

    def __init__(self, built: BuiltEngine, config: ServeConfig, num_requests: int) -> None:
        self._grammars = built.grammars
        self._scheduler = new_scheduler(built, config)
        self._pipeline = StepPipeline(self._scheduler, built.runner, overlap=built.overlap)
        self.num_requests = num_requests
        text = load_text_model(resolve_model(config.model), config)
        self._prompt = np.array(text.encode_prompt(PROMPT), "<i4").tobytes()
        self._next_uid = 0

    def run(self, sampling: SamplingParams, *, jumps: bool = False) -> Run:
        grammar = sampling.grammar
        watched = [Watched(self._grammars.compile(grammar), jumps=jumps) for _ in range(self.num_requests) if grammar]
        before, wall, cpu = self._scheduler.stats(), time.perf_counter(), time.process_time()
        for constraint in watched or [None] * self.num_requests:
            self._next_uid += 1
            submit = Submit(self._next_uid, str(self._next_uid), self._prompt, sampling)
            assert self._scheduler.submit(FRONTEND, submit, constraint) is None
        failed = False
        while self._pipeline.advance():
            events = self._scheduler.take_outputs().get(FRONTEND, Outputs()).events
            failed = failed or any(event.error for event in events)
        assert not failed
        cpu, wall, after = time.process_time() - cpu, time.perf_counter() - wall, self._scheduler.stats()
        run = Run(cpu, wall, after.generated_tokens - before.generated_tokens, after.steps - before.steps)
        if not watched:
            return run
        spent_s, num_masks = sum(one.spent_s for one in watched), sum(one.num_masks for one in watched)
        return replace(run, grammar_us=1e6 * spent_s / num_masks)


def measure(bench: Bench, rounds: int) -> dict[str, list[Run]]:
    record = SamplingParams(temperature=0, max_tokens=400, grammar=structural_tag(json_schema(SCHEMA)))
    letters = SamplingParams(temperature=0, max_tokens=NUM_LETTER_TOKENS, grammar=structural_tag(regex(LETTERS)))
    num_tokens = bench.run(record, jumps=True).tokens // bench.num_requests
    free = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    found: dict[str, list[Run]] = {}
    for _ in range(rounds):
        for name, sampling, jumps in (
            ("record, no grammar", free, False),
            ("record, masks", record, False),
            ("record, masks and jumps", record, True),
            ("letters, masks", letters, False),
            ("letters, masks and jumps", letters, True),
        ):
            found.setdefault(name, []).append(bench.run(sampling, jumps=jumps))
    return found


def middle(runs: Sequence[Run], field: str) -> float:
    return statistics.median(getattr(run, field) for run in runs)


def report(found: dict[str, list[Run]], num_requests: int) -> None:
    print(f"| {num_requests} together | tokens each | steps | CPU ms an answer | tokens/CPU s | grammar us a token |")
    print("|---|---|---|---|---|---|")
    for name, runs in found.items():
        tokens, steps = middle(runs, "tokens") / num_requests, middle(runs, "steps")
        cpu_ms, rate = 1e3 * middle(runs, "cpu_s") / num_requests, middle(runs, "tokens_per_cpu_s")
        print(f"| {name} | {tokens:.0f} | {steps:.0f} | {cpu_ms:.0f} | {rate:.0f} | {middle(runs, 'grammar_us'):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="that run together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None, help="default: the usable cores")
    parser.add_argument("--output", type=Path, help="JSON file for all runs")
    options = parser.parse_args()
    config = ServeConfig(device="cpu", cpu_threads=options.threads)
    built = build_engine(config)
    results: dict[str, dict[str, list[Run]]] = {}
    for num_requests in options.requests:
        results[str(num_requests)] = measure(Bench(built, config, num_requests), options.rounds)
        report(results[str(num_requests)], num_requests)
    if options.output:
        rows = {n: {name: [asdict(run) for run in runs] for name, runs in r.items()} for n, r in results.items()}
        options.output.write_text(json.dumps({"engine": built.description, "requests": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
