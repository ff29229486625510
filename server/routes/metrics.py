"""GET /metrics: everything that is counted, for Prometheus. ``docs/metrics.md`` describes each metric."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from radixserve.engine.messages import EngineStats, EngineStatus
from radixserve.server.metrics import BOUNDS, COUNTERS, Histogram, Numbers
from radixserve.server.routes.common import frontend_of

router = APIRouter(tags=["operation"])

PREFIX = "radixserve:"

_HELP = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "inter_token_latency_seconds": "Between two tokens of a request",
    "e2e_request_latency_seconds": "From a request's arrival to its last token",
    "request_queue_time_seconds": "From a request's arrival in the engine to its admission",
    "request_prefill_time_seconds": "From a request's admission to its first token",
    "request_decode_time_seconds": "From a request's first token to its last",
    "request_prompt_tokens": "Tokens of a request's prompt",
    "request_generation_tokens": "Tokens generated for a request",
    "request_success": "Requests answered to their end",
    "admission_rejections": "Requests that the engine refused",
    "num_aborted_requests": "Requests whose client left, or that /abort_request ended",
    "num_failed_requests": "Requests that ended with an error",
}
# Counters of the engine, since it was started: metric, field of EngineStats, help.
_ENGINE_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests"),
    ("prompt_tokens_cached", "cached_tokens", "Prompt tokens served from the prefix cache"),
    ("prefix_cache_queries", "prompt_tokens", "Tokens looked up in the prefix cache"),
    ("prefix_cache_hits", "cached_tokens", "Tokens found in the prefix cache"),
    ("generation_tokens", "generated_tokens", "Tokens generated"),
    ("forced_tokens", "forced_tokens", "Generated tokens that a grammar forced, so that no step was needed for them"),
    ("evicted_tokens", "evicted_tokens", "Tokens dropped from the prefix cache for others"),
    ("num_preemptions", "retracted", "Times a running request was put back to wait for memory"),
    ("engine_steps", "steps", "Forward passes"),
)


class Snapshot(Collector):
    """All metrics as of one moment. ``status``: of the engine, None when there is none. ``model``: first served name"""

    def __init__(self, status: EngineStatus | None, numbers: Numbers, model: str) -> None:
        self._status = status
        self._numbers = numbers
        self._model = model

    def collect(self) -> Iterator[Metric]:
        ready = self._status is not None and self._status.phase == "ready"
        yield self._gauge("engine_up", "1 when the engine's model is loaded", float(ready))
        if self._status is not None and ready:
            yield from self._engine(self._status.stats)
        for name, label in COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, _HELP[name], labels=["model_name", *([label] if label else [])])
            for value, count in self._numbers.counters[name].items():
                family.add_metric([self._model, *([value] if label else [])], count)
            yield family
        for name in BOUNDS:
            yield self._histogram(name, self._numbers.histograms[name])

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        total, free, evictable = stats.kv_total_tokens, stats.kv_free_tokens, stats.kv_evictable_tokens
        in_use = total - free - evictable
        yield self._gauge("num_requests_running", "Requests being computed", stats.running)
        yield self._gauge("num_requests_waiting", "Requests waiting for a seat or memory", stats.waiting)
        usage = in_use / total if total else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache that running requests hold; 1 is full", usage)
        tokens = GaugeMetricFamily(PREFIX + "kv_cache_tokens", "KV cache, in tokens", labels=["model_name", "state"])
        for state, count in (("in_use", in_use), ("cached", evictable), ("free", free)):
            tokens.add_metric([self._model, state], count)
        yield tokens
        for name, field, text in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], getattr(stats, field))
            yield counter

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        buckets: list[tuple[str, float]] = []
        cumulative = 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), cumulative))
        family = HistogramMetricFamily(PREFIX + name, _HELP[name], labels=["model_name"])
        family.add_metric([self._model], buckets, histogram.total)
        return family


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus' text format, never OpenMetrics: in that the client library replaces the colon of our names."""
    frontend = frontend_of(request)
    status = await frontend.client.fresh_status()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot(status, frontend.worker_numbers.sum_of_all(), frontend.model_names[0]))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
