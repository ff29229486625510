"""OpenTelemetry traces: one span for each request of the engine. Off unless an OTLP endpoint is configured.

Everything else is configured by OpenTelemetry's own ``OTEL_*`` variables too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry import context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixserve.engine.errors import ConfigError
from radixserve.engine.messages import Submit, TokenEvent

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def tracer_from(environ: Mapping[str, str]) -> Tracer | None:
    """Exports spans in batches from a thread. Raises ``ConfigError`` when the packages of the extra are missing."""
    wanted = [name for name in _ENDPOINTS if environ.get(name)]
    if not wanted or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(f"{wanted[0]} is set, but traces need more: pip install 'radixserve[otel]'") from None
    name = environ.get("OTEL_SERVICE_NAME", "radixserve")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("radixserve")


class RequestSpan:
    """The span of one request, from its ``Submit`` to its end; a child of the span that its client sent."""

    def __init__(self, tracer: Tracer, request: Submit) -> None:
        sampling = request.sampling
        attributes: dict[str, str | float] = {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        self._span: Span = tracer.start_span("llm_request", kind=SpanKind.SERVER, attributes=attributes)

    def first_token(self, event: TokenEvent, ttft_s: float) -> None:
        now_ns = time.time_ns()
        self._span.set_attribute("gen_ai.latency.time_to_first_token", ttft_s)
        self._span.set_attribute("gen_ai.usage.cached_tokens", event.cached_tokens)
        if event.queue_s is not None and event.prefill_s is not None:
            self._span.set_attribute("gen_ai.latency.time_in_queue", event.queue_s)
            self._span.set_attribute("gen_ai.latency.time_in_model_prefill", event.prefill_s)
            self._span.add_event("admitted", timestamp=now_ns - int(event.prefill_s * 1e9))
        self._span.add_event("first_token", timestamp=now_ns)

    def end(self, outcome: str, reason: str, *, prompt_tokens: int, generated_tokens: int) -> None:
        self._span.set_attribute("gen_ai.usage.prompt_tokens", prompt_tokens)
        self._span.set_attribute("gen_ai.usage.completion_tokens", generated_tokens)
        if outcome == "request_success":
            self._span.set_attribute("gen_ai.response.finish_reasons", [reason])
        else:
            self._span.set_status(StatusCode.ERROR, reason or outcome)
        self._span.end()


@dataclass(slots=True)
class TraceParents:
    """An ASGI layer: the header ``traceparent`` of a request makes its spans part of the client's trace."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        token = context.attach(TraceContextTextMapPropagator().extract(Headers(scope=scope)))
        try:
            await self.app(scope, receive, send)
        finally:
            context.detach(token)
        return None
