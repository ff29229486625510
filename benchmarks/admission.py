"""What the rules of admission mean for streams: the real scheduler, in simulated time, under the load of W4.

    python benchmarks/admission.py [--model 8B] [--targets 0 25 50] [--prompt-tokens 64 8192]

Steps take what ``MODELS`` says (Qwen3 shapes on an H200, from benchmarks/notes/gpu_engine.md); clients send their next
request as soon as the last one is answered. Nothing of the frontend or the network is in it.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.messages import Submit
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.scheduler import Scheduler, SchedulerLimits
from radixserve.engine.step import StepPlan, StepResult
from radixserve.kvcache.manager import CacheManager
from radixserve.kvcache.radix import RadixPrefixCache

_FRONTEND = b"f"
_MAX_LEN = 16_384
_TEMPLATE_TOKENS = 30
_CLIENT_MS = 3.0  # from the last token of an answer until the next request is with the scheduler


Work = tuple[np.ndarray, int]  # prompt, output length


@dataclass(frozen=True)
class StepTime:
    """Milliseconds. ``eager_ms``: host time to launch a step with prompts, when it has more than ``graph_tokens``."""

    base_ms: float
    token_ms: float  # products, norms, head
    kv_token_ms: float  # a cached token of a decode
    eager_ms: float
    graph_tokens: int = 2048
    graph_ms: float = 0.4  # host time of a step that is replayed

    def device(self, plan: StepPlan) -> float:
        return self.base_ms + self.token_ms * plan.num_tokens + self.kv_token_ms * float(plan.decode_lens.sum())

    def host(self, plan: StepPlan) -> float:
        return self.eager_ms if plan.chunks and plan.num_tokens > self.graph_tokens else self.graph_ms


MODELS = {
    "0.6B": StepTime(base_ms=0.55, token_ms=0.0020, kv_token_ms=2.71e-5, eager_ms=10.0),
    "8B": StepTime(base_ms=2.6, token_ms=0.0227, kv_token_ms=3.5e-5, eager_ms=13.0),
}


@dataclass
class Outcome:
    """Times in ms."""

    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    end: float = 0.0

    def line(self) -> str:
        ttft, gap = np.percentile(self.ttfts, [50, 99]), np.percentile(self.gaps, [50, 90, 99, 100])
        speed = 1e3 * self.tokens / self.end
        return f"{speed:9,.0f} |{ttft[0]:8,.0f} {ttft[1]:8,.0f} |" + "".join(f"{value:7.1f}" for value in gap)


class Simulation:
    """A closed loop of ``clients`` that send ``work``, on a scheduler with overlapped steps."""

    def __init__(
        self, options: SchedulerOptions, step_time: StepTime, target_ms: float, clients: int, work: Iterator[Work]
    ) -> None:
        rows = options.max_num_seqs
        cache = CacheManager(RadixPrefixCache(16), 1_000_000 // 16, rows, _MAX_LEN // 16)
        limits = SchedulerLimits(
            max_model_len=_MAX_LEN, vocab_size=50_000, step_tokens=8192, target_itl_s=target_ms / 1e3 or None
        )
        self._now = 0.0
        self._scheduler = Scheduler(cache, limits, options, clock=lambda: self._now / 1e3)
        self._step_time = step_time
        self._work = work
        self._arrivals = [(0.0, uid) for uid in range(clients)]
        self._next_uid = clients
        self._sent: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """With overlap: the host launches a step while the device runs the one before, and then waits for that one."""
        in_flight: tuple[StepPlan, float] | None = None
        while self._scheduler.requests or self._arrivals or in_flight:
            self._submit_due()
            plan, done = self._scheduler.schedule(), in_flight
            in_flight = None
            if plan is not None:
                launched = self._now + self._step_time.host(plan)
                starts = done[1] if done else self._now
                in_flight = plan, max(starts + self._step_time.device(plan), launched)
                self._now = launched
            if done:
                self._complete(*done)
            elif plan is None and self._arrivals:
                self._now = max(self._now, self._arrivals[0][0])
        self._outcome.end = self._now
        return self._outcome

    def _submit_due(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now:
            at, uid = heapq.heappop(self._arrivals)
            submit = next(self._work, None)
            if submit is not None:
                prompt, max_tokens = submit
                rules = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                assert self._scheduler.submit(_FRONTEND, Submit(uid, f"r{uid}", prompt.tobytes(), rules)) is None
                self._sent[uid] = at

    def _complete(self, plan: StepPlan, at: float) -> None:
        self._now = max(self._now, at)
        tokens = np.ones(plan.num_samples, np.int32)
        self._scheduler.complete(plan, StepResult(tokens, np.zeros(plan.num_samples, np.bool_)))
        outputs = self._scheduler.take_outputs().get(_FRONTEND)
        for event in outputs.each() if outputs else ():
            self._outcome.tokens += len(event.token_ids)
            if event.uid in self._last:
                self._outcome.gaps.append(self._now - self._last[event.uid])
            else:
                self._outcome.ttfts.append(self._now - self._sent[event.uid])
            self._last[event.uid] = self._now
            if event.finish is not None:
                heapq.heappush(self._arrivals, (self._now + _CLIENT_MS, self._next_uid))
                self._next_uid += 1


def draw(count: int, prompt_tokens: tuple[int, int]) -> Iterator[Work]:
    """Prompts behind a template that all share, and output lengths of W4."""
    rng, ids = random.Random(0), np.random.default_rng(0)
    template = np.arange(_TEMPLATE_TOKENS, dtype=np.int32)
    for _ in range(count):
        text = ids.integers(100, 50_000, rng.randint(*prompt_tokens), dtype=np.int32)
        yield np.concatenate([template, text]), rng.randint(64, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="0.6B")
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--max-num-seqs", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--targets", type=float, nargs="+", default=[0.0, 25.0, 50.0], help="ms; 0: none")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(64, 512))
    parser.add_argument("--eager", action="store_true", help="steps with prompts are never replayed")
    args = parser.parse_args()
    step_time = MODELS[args.model] if not args.eager else replace(MODELS[args.model], graph_tokens=0)
    print("clients running target |   tok/s | TTFT p50      p99 |gap p50    p90    p99    max")
    for clients, rows, target in itertools.product(args.clients, args.max_num_seqs, args.targets):
        if rows > max(256, clients):
            continue
        options = SchedulerOptions(max_num_seqs=rows, max_num_queued_reqs=100_000, max_num_queued_tokens=1 << 30)
        work = draw({16: 64, 256: 1024}.get(clients, 2 * clients), tuple(args.prompt_tokens))
        outcome = Simulation(options, step_time, target, clients, work).run()
        print(f"{clients:7} {rows:7} {target:6.0f} |{outcome.line()}", flush=True)


if __name__ == "__main__":
    main()
