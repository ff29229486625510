"""Requests as spans, received by a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from radixserve.engine.errors import ConfigError
from radixserve.server.tracing import tracer_from
from radixserve.tests.server.service import CHAT, COMPLETIONS, running_service, wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@contextmanager
def running_collector() -> Iterator[tuple[str, list[bytes]]]:
    """Its address, and the bodies that were posted to it."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{collector.server_port}", bodies
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()


def test_each_request_is_a_span_in_the_trace_of_its_client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with running_collector() as (address, bodies):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with running_service(folder) as service, httpx.Client(base_url=service.url) as client:
            headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "x-request-id": "mine"}
            messages = [{"role": "user", "content": "<<hello>>"}]
            assert client.post(CHAT, json={"messages": messages, "max_tokens": 9}, headers=headers).status_code == 200
            assert client.post(COMPLETIONS, json={"prompt": "{reject}"}).status_code == 429

            def spans() -> list[object]:
                exports = [ExportTraceServiceRequest.FromString(body) for body in bodies]
                return [s for e in exports for r in e.resource_spans for scope in r.scope_spans for s in scope.spans]

            wait_until(lambda: len(spans()) == 2)
    answered, refused = spans()
    assert answered.trace_id.hex() == TRACE and answered.parent_span_id.hex() == "00f067aa0ba902b7"
    assert [event.name for event in answered.events] == ["admitted", "first_token"]
    assert answered.events[1].time_unix_nano - answered.events[0].time_unix_nano == 250_000_000
    facts = {item.key: item.value for item in answered.attributes}
    assert facts["gen_ai.request.id"].string_value == "mine"
    assert facts["gen_ai.usage.completion_tokens"].int_value == 6
    assert facts["gen_ai.latency.time_in_queue"].double_value == 0.5
    assert facts["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "stop"
    assert refused.trace_id.hex() != TRACE and not refused.parent_span_id
    assert (refused.status.code, refused.status.message) == (2, "queue_full")


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert tracer_from({}) is None
    assert tracer_from({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"}) is None


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set.*radixserve\[otel\]"):
        tracer_from({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
