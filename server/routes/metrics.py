"""GET /metrics: everything that is counted, for Prometheus. ``docs/metrics.md`` describes each metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from radixserve.engine.messages import EngineStats, EngineStatus
from radixserve.server.metrics import COUNTERS, HISTOGRAMS, Histogram, Numbers
from radixserve.server.routes.common import DirectRoute, frontend_of

router = APIRouter(tags=["operation"], route_class=DirectRoute)

PREFIX = "radixserve:"

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


@dataclass(eq=False)
class Snapshot(Collector):
    """All metrics as of one moment. ``status``: of the engine, None when there is none. ``model``: first served name"""

    status: EngineStatus | None
    numbers: Numbers
    model: str

    def collect(self) -> Iterator[Metric]:
        ready = self.status is not None and self.status.phase == "ready"
        yield self._family(GaugeMetricFamily, "engine_up", "1 when the engine's model is loaded", {"": float(ready)})
        if self.status is not None and ready:
            yield from self._engine(self.status.stats)
        for name, (text, label) in COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text, self.numbers.counters[name], label)
        for name, (text, _) in HISTOGRAMS.items():
            yield self._histogram(name, text, self.numbers.histograms[name])

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        total, free, evictable = stats.kv_total_tokens, stats.kv_free_tokens, stats.kv_evictable_tokens
        in_use = total - free - evictable
        usage = in_use / total if total else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests being computed", stats.running),
            ("num_requests_waiting", "Requests waiting for a seat or memory", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache that running requests hold; 1 is full", usage),
        ):
            yield self._family(GaugeMetricFamily, name, text, {"": value})
        tokens = {"in_use": in_use, "cached": evictable, "free": free}
        yield self._family(GaugeMetricFamily, "kv_cache_tokens", "KV cache, in tokens", tokens, "state")
        for name, field, text in _ENGINE_COUNTERS:
            yield self._family(CounterMetricFamily, name, text, {"": getattr(stats, field)})

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        label: str = "",
    ) -> Metric:
        """``values`` by what ``label`` is; without a label there is one value."""
        family = kind(PREFIX + name, text, labels=["model_name", *([label] if label else [])])
        for what, value in values.items():
            family.add_metric([self.model, *([what] if label else [])], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        bounds = map(floatToGoString, (*histogram.bounds, math.inf))
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model], buckets, histogram.total)
        return family


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus' text format, never OpenMetrics: in that the client library replaces the colon of our names."""
    frontend = frontend_of(request)
    status = await frontend.client.fresh_status()
    snapshot = Snapshot(status, frontend.worker_numbers.sum_of_all(), frontend.model_names[0])
    return Response(generate_latest(snapshot), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
