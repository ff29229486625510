"""The page's files, and the stream of events behind it: who may read what, and that it costs nothing unwatched."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixserve.engine.messages import Watch
from radixserve.server.auth import EVENTS_PATH
from radixserve.server.routes.page import MAX_WATCHERS, TICK_S
from radixserve.tests.server.fake_engine import TREE_TEXT
from radixserve.tests.server.service import Service, running_service


@contextmanager
def watching(url: str, headers: dict[str, str] | None = None) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events (name, data) of the stream."""
    with httpx.stream("GET", url + EVENTS_PATH, headers=headers, timeout=10) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer)


def _events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def first_view(url: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    with watching(url, headers) as events:
        view: dict[str, Any] = next(data for name, data in events if name == "view")
        return view


def test_the_page_comes_whole_from_here_and_runs_nothing_inline(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    links = [part.split('"')[0] for part in page.text.replace('src="', 'href="').split('href="')[1:]]
    files = [link for link in links if not link.startswith("#")]
    assert len(files) == 3 and all(link.startswith("/page/") for link in files)
    for link in files:
        assert http.get(link).status_code == 200
    assert http.get("/page/main.js").headers["content-type"].startswith("text/javascript")
    assert http.get("/page/../auth.py").status_code == http.get("/page/none.js").status_code == 404


def test_a_watcher_is_shown_the_engine_and_what_the_server_measures(service: Service) -> None:
    with watching(service.url) as events:
        seen: dict[str, Any] = {}
        for name, data in events:
            seen.setdefault(name, data)
            if len(seen) == 2:
                break
    assert seen["server"]["health"]["status"] == "ok"
    assert set(seen["server"]["latency"]["time_to_first_token_seconds"]) == {"bounds", "counts", "total"}
    view = seen["view"]
    assert view["with_text"] and view["tree"][0]["head"] == TREE_TEXT
    assert view["events"][0]["kind"] == "insert" and view["events"][0]["nodes"][0]["head"] == TREE_TEXT
    assert view["steps"] == [{"step": 1, "at": 1.0, "num_decodes": 2, "num_prompt_tokens": 3, "chunks": [["r", 0, 3]]}]


def test_the_engine_is_asked_only_while_somebody_watches(service: Service) -> None:
    with watching(service.url) as events:
        next(events)
        service.wait_until(lambda: service.engine.watches[-2:] == [Watch(anew=False)] * 2)
    time.sleep(1.2 * TICK_S)  # until it is noticed
    before = len(service.engine.watches)
    time.sleep(1.2 * TICK_S)
    assert len(service.engine.watches) == before


def test_too_many_watchers_are_refused(service: Service) -> None:
    with httpx.Client(base_url=service.url, timeout=10, limits=httpx.Limits(max_connections=None)) as client:
        streams = [client.send(client.build_request("GET", EVENTS_PATH), stream=True) for _ in range(MAX_WATCHERS)]
        refused = client.get(EVENTS_PATH)
        for stream in streams:
            stream.close()
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_watchers"


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"x-forwarded-for": "192.0.2.1"}, {"host": "192.0.2.7:8000"}],
    ids=["a name that may be rebound", "through a proxy", "another address"],
)
def test_without_keys_texts_are_for_this_machine_only(service: Service, headers: dict[str, str]) -> None:
    assert first_view(service.url, {"host": "localhost"})["with_text"]
    view = first_view(service.url, headers)
    assert not view["with_text"]
    assert "head" not in view["tree"][0] and "head" not in view["events"][0]["nodes"][0]
    assert TREE_TEXT not in json.dumps(view)


def test_with_keys_texts_are_for_an_only_owner(folder: Path) -> None:
    with running_service(folder, api_key=("k-one",)) as service:
        assert httpx.get(service.url).status_code == 200, "the page asks for the key itself"
        assert httpx.get(service.url + EVENTS_PATH).status_code == 401
        far = {"authorization": "Bearer k-one", "x-forwarded-for": "192.0.2.1"}
        assert first_view(service.url, far)["with_text"]


def test_keys_of_several_owners_show_no_texts(folder: Path) -> None:
    with running_service(folder, api_key=("k-one", "k-two")) as service:
        assert not first_view(service.url, {"authorization": "Bearer k-one"})["with_text"]


def test_where_operators_have_a_key_only_they_watch(folder: Path) -> None:
    with running_service(folder, api_key=("k-one", "k-two"), admin_api_key=("k-admin",)) as service:
        refused = httpx.get(service.url + EVENTS_PATH, headers={"authorization": "Bearer k-one"})
        assert refused.status_code == 403
        assert first_view(service.url, {"authorization": "Bearer k-admin"})["with_text"]


def test_the_page_can_be_left_out_or_show_all(folder: Path) -> None:
    with running_service(folder, page="off") as service:
        assert httpx.get(service.url).status_code == httpx.get(service.url + EVENTS_PATH).status_code == 404
        assert httpx.get(service.url + "/page/main.js").status_code == 404
    other = folder / "other"
    other.mkdir()
    with running_service(other, page="full") as service:
        assert first_view(service.url, {"host": "inside.example"})["with_text"]
