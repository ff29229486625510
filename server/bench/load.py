"""Closed-loop streaming load: N clients, each sending its next request when the last one has ended.

The work is drawn before the clock starts and dealt to client processes, so that one Python client is not what is
measured. Every request streams with usage; tokens are counted by the server's usage, times by the client's clock.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import httpx

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house"
).split()


@dataclass(frozen=True)
class Workload:
    """``clients`` send ``requests`` in all; words of the user text and generated tokens are uniform in their ranges."""

    url: str
    model: str
    clients: int
    requests: int
    prompt_words: tuple[int, int] = (64, 512)
    max_tokens: tuple[int, int] = (64, 512)
    processes: int = 1
    seed: int = 0
    api_key: str | None = None
    timeout_s: float = 600.0


@dataclass
class Sample:
    """What one request saw; times in seconds."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class LoadReport:
    """Samples of a run and the wall time that all of it took, in seconds."""

    samples: list[Sample]
    wall_s: float

    def summary(self) -> dict[str, float]:
        good = [sample for sample in self.samples if sample.error is None]
        gaps = sorted(gap for sample in good for gap in sample.gaps_s)
        ttfts = sorted(sample.ttft_s for sample in good)
        return {
            "requests": len(self.samples),
            "errors": len(self.samples) - len(good),
            "wall_s": self.wall_s,
            "output_tokens_per_s": sum(sample.completion_tokens for sample in good) / self.wall_s,
            "prompt_tokens_per_s": sum(sample.prompt_tokens for sample in good) / self.wall_s,
            "cached_tokens": sum(sample.cached_tokens for sample in good),
            "requests_per_s": len(good) / self.wall_s,
            "ttft_p50_ms": 1e3 * percentile(ttfts, 0.50),
            "ttft_p99_ms": 1e3 * percentile(ttfts, 0.99),
            "gap_p50_ms": 1e3 * percentile(gaps, 0.50),
            "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        }


def percentile(ordered: list[float], share: float) -> float:
    """The value below which ``share`` of an ascending list lies (nearest rank); 0 for an empty list."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def run_load(workload: Workload) -> LoadReport:
    """Send the whole workload and wait for it; errors of single requests are samples, not exceptions."""
    bodies = _draw_bodies(workload)
    processes = min(workload.processes, workload.clients)
    shares = [bodies[i::processes] for i in range(processes)]
    clients = [len(range(i, workload.clients, processes)) for i in range(processes)]
    if processes == 1:
        start = time.perf_counter()
        samples = _client_process(workload, shares[0], clients[0])
        return LoadReport(samples, time.perf_counter() - start)
    with ProcessPoolExecutor(processes) as pool:
        list(pool.map(time.sleep, [0.2] * processes))  # the processes exist before the clock starts
        start = time.perf_counter()
        parts = list(pool.map(_client_process, [workload] * processes, shares, clients))
    return LoadReport([sample for part in parts for sample in part], time.perf_counter() - start)


def _draw_bodies(workload: Workload) -> list[dict[str, object]]:
    rng = random.Random(workload.seed)
    bodies: list[dict[str, object]] = []
    for _ in range(workload.requests):
        text = " ".join(rng.choices(WORDS, k=rng.randint(*workload.prompt_words)))
        bodies.append(
            {
                "model": workload.model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": rng.randint(*workload.max_tokens),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return bodies


def _client_process(workload: Workload, bodies: list[dict[str, object]], clients: int) -> list[Sample]:
    return asyncio.run(_closed_loop(workload, bodies, clients))


async def _closed_loop(workload: Workload, bodies: list[dict[str, object]], clients: int) -> list[Sample]:
    samples: list[Sample] = []
    queue = iter(bodies)
    headers = {"authorization": f"Bearer {workload.api_key}"} if workload.api_key else {}
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(
        base_url=workload.url, headers=headers, limits=limits, timeout=workload.timeout_s, trust_env=False
    ) as http:

        async def one_client() -> None:
            for body in queue:
                samples.append(await _one_request(http, body))

        await asyncio.gather(*(one_client() for _ in range(clients)))
    return samples


async def _one_request(http: httpx.AsyncClient, body: dict[str, object]) -> Sample:
    sample = Sample()
    start = last = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                sample.error = (await response.aread()).decode(errors="replace")[:200]
                return sample
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = time.perf_counter()
                event = json.loads(line[6:])
                if "error" in event:
                    sample.error = str(event["error"])[:200]
                elif _has_text(event):
                    if sample.ttft_s:
                        sample.gaps_s.append(now - last)
                    else:
                        sample.ttft_s = now - start
                    last = now
                _take_usage(sample, event.get("usage"))
    except httpx.HTTPError as error:
        sample.error = repr(error)
    sample.total_s = time.perf_counter() - start
    return sample


def _has_text(event: dict[str, object]) -> bool:
    choices = event.get("choices")
    return isinstance(choices, list) and bool(choices) and bool(choices[0]["delta"].get("content"))


def _take_usage(sample: Sample, usage: object) -> None:
    if isinstance(usage, dict):
        sample.prompt_tokens = usage["prompt_tokens"]
        sample.completion_tokens = usage["completion_tokens"]
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
