"""GET /metrics, read by Prometheus' own parser: what requests do to it, and one answer for all workers."""

from __future__ import annotations

import math
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixserve.engine.messages import EngineStats, EngineStatus, TokenEvent
from radixserve.server.metrics import HISTOGRAMS, Numbers, RequestMeter, WorkerNumbers
from radixserve.server.routes.metrics import PREFIX, Snapshot
from radixserve.tests.server.service import COMPLETIONS, Service, running_frontend, running_service, wait_until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> Samples:
    text = httpx.get(f"{url}/metrics").raise_for_status().text
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            key = sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())
            assert sample.name.startswith(PREFIX) and key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


class Change:
    """What changes in the metrics of ``service`` from now on."""

    def __init__(self, service: Service) -> None:
        self._url = service.url
        self._before = scrape(self._url)

    def __call__(self, name: str, **labels: str) -> float:
        return value(scrape(self._url), name, **labels) - value(self._before, name, **labels)


@pytest.fixture
def change(service: Service) -> Change:
    return Change(service)


def test_an_answer_is_counted_once_with_its_tokens_and_times(http: httpx.Client, change: Change) -> None:
    assert http.post(COMPLETIONS, json={"prompt": "<<hello>>"}).status_code == 200
    assert change("request_success_total", finished_reason="stop") == 1
    for histogram in HISTOGRAMS:
        assert change(f"{histogram}_count") == (5 if histogram == "inter_token_latency_seconds" else 1), histogram
    assert change("request_prompt_tokens_sum") == 9
    assert change("request_generation_tokens_sum") == 6  # the end-of-sequence token, too
    assert change("request_queue_time_seconds_sum") == 0.5
    assert change("request_prefill_time_seconds_sum") == 0.25
    whole = change("e2e_request_latency_seconds_sum")
    parts = change("time_to_first_token_seconds_sum") + change("request_decode_time_seconds_sum")
    assert math.isclose(whole, parts) and whole > 0
    assert math.isclose(change("inter_token_latency_seconds_sum"), change("request_decode_time_seconds_sum"))


@pytest.mark.parametrize(
    ("fields", "reason"), [({"stop": "l"}, "stop"), ({"max_tokens": 2}, "length"), ({"n": 1, "max_tokens": 9}, "stop")]
)
def test_answers_are_told_apart_by_what_ended_them(
    http: httpx.Client, change: Change, fields: dict[str, object], reason: str
) -> None:
    assert http.post(COMPLETIONS, json={"prompt": "<<hello>>", **fields}).status_code == 200
    assert change("request_success_total", finished_reason=reason) == 1
    assert change("num_aborted_requests_total") == 0
    assert change("e2e_request_latency_seconds_count") == 1


def test_refusals_failures_and_aborts_are_counted_and_are_no_success(
    service: Service, http: httpx.Client, change: Change
) -> None:
    assert http.post(COMPLETIONS, json={"prompt": "{reject}"}).status_code == 429
    assert http.post(COMPLETIONS, json={"prompt": "<<long>> {fail}"}).status_code == 500
    with http.stream("POST", COMPLETIONS, json={"prompt": "<<long answer>> {slow}", "stream": True}) as response:
        next(response.iter_lines())
    service.wait_until(lambda: change("num_aborted_requests_total") == 1)
    assert change("admission_rejections_total", reason="queue_full") == 1
    assert change("num_failed_requests_total") == 1
    assert change("request_success_total", finished_reason="stop") == 0
    assert change("e2e_request_latency_seconds_count") == 0


def test_buckets_are_cumulative_and_end_with_the_count(service: Service, http: httpx.Client) -> None:
    assert http.post(COMPLETIONS, json={"prompt": "<<hello>>"}).status_code == 200
    samples = scrape(service.url)
    for name, (_, bounds) in HISTOGRAMS.items():
        counts = [value(samples, f"{name}_bucket", le=str(bound)) for bound in bounds]
        counts.append(value(samples, f"{name}_bucket", le="+Inf"))
        assert counts == sorted(counts)
        assert counts[-1] == value(samples, f"{name}_count") > 0


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Numbers.zero().histograms["request_prompt_tokens"]
    for tokens in (1, 2, 3, 10**9):
        histogram.observe(tokens)
    assert histogram.counts[:3] == [1, 1, 1] and histogram.counts[-1] == 1


def test_a_scraper_that_prefers_openmetrics_gets_the_same_names(service: Service) -> None:
    plain = httpx.get(f"{service.url}/metrics")
    answer = httpx.get(f"{service.url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"] == plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text == plain.text


def ready(**stats: int) -> EngineStatus:
    return EngineStatus(1, "ready", stats=EngineStats(**stats))


def test_counters_of_the_engine_are_those_of_its_last_status() -> None:
    status = ready(
        running=2, waiting=3, kv_total_tokens=100, kv_free_tokens=30, kv_evictable_tokens=20, prompt_tokens=70,
        cached_tokens=40, generated_tokens=9, forced_tokens=4, evicted_tokens=8, retracted=1,
    )  # fmt: skip
    found = {
        (sample.name.removeprefix(PREFIX), sample.labels.get("state")): sample.value
        for family in Snapshot(status, Numbers.zero(), "tiny").collect()
        for sample in family.samples
    }
    expected = {
        "num_requests_running": 2, "num_requests_waiting": 3, "kv_cache_usage_perc": 0.5, "prompt_tokens_total": 70,
        "prompt_tokens_cached_total": 40, "prefix_cache_queries_total": 70, "prefix_cache_hits_total": 40,
        "generation_tokens_total": 9, "forced_tokens_total": 4, "evicted_tokens_total": 8, "num_preemptions_total": 1,
        "engine_up": 1,
    }  # fmt: skip
    assert expected.items() <= {name: value for (name, state), value in found.items() if state is None}.items()
    assert {state: number for (_, state), number in found.items() if state} == {"in_use": 50, "cached": 20, "free": 30}


@pytest.mark.parametrize("status", [None, EngineStatus(1, "loading")])
def test_without_a_ready_engine_its_gauges_are_absent_instead_of_wrong(status: EngineStatus | None) -> None:
    families = {family.name.removeprefix(PREFIX): family for family in Snapshot(status, Numbers.zero(), "m").collect()}
    assert families["engine_up"].samples[0].value == 0
    assert "num_requests_running" not in families and "request_success" in families


def test_one_scrape_of_any_worker_tells_of_all(folder: Path) -> None:
    with running_service(folder, api_workers=2) as first:
        with running_frontend(first.frontend.config, f"ipc://{folder}/engine") as (second_url, _):
            wait_until(lambda: httpx.get(f"{second_url}/health").status_code == 200)
            for url, times in ((first.url, 2), (second_url, 3)):
                for _ in range(times):
                    assert httpx.post(f"{url}{COMPLETIONS}", json={"prompt": "<<hi>>"}).status_code == 200
            wait_until(lambda: all(answers(url) == 5 for url in (first.url, second_url)))
        assert answers(first.url) == 5  # those of a worker that left still count


def test_all_workers_round_a_sum_alike(tmp_path: Path) -> None:
    workers = [WorkerNumbers(tmp_path) for _ in range(5)]
    for worker, seconds in zip(workers, (1e16, 1.0, 0.1, 0.7, 3.3), strict=True):
        worker.numbers.histograms["e2e_request_latency_seconds"].observe(seconds)
        worker.publish()
    assert len({worker.sum_of_all().histograms["e2e_request_latency_seconds"].total for worker in workers}) == 1


def answers(url: str) -> float:
    return value(scrape(url), "request_success_total", finished_reason="stop")


def test_a_request_that_ends_twice_is_counted_once(tmp_path: Path) -> None:
    numbers = WorkerNumbers(tmp_path).numbers
    meter = RequestMeter(numbers, 3)
    meter.on_tokens(TokenEvent(1, [5]), 10.0)
    meter.end("num_failed_requests")
    meter.end("num_aborted_requests")
    meter.end("request_success", "stop")
    assert numbers.counters["num_failed_requests"] == {"": 1}
    assert numbers.counters["num_aborted_requests"] == {"": 0} and numbers.counters["request_success"] == {}
