"""The page at / in a real browser, before the real engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from radixserve.tests.e2e.browser import Tab, find_chromium, running_browser
from radixserve.tests.e2e.server_process import RunningServer
from radixserve.tests.server.fake_engine import TREE_TEXT
from radixserve.tests.server.service import running_service

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt install chromium")

FACTS = "document.querySelector('.message.assistant:last-child .hint').textContent"
FITS = """[...document.querySelectorAll('section')].every((part) => part.scrollWidth <= part.clientWidth)
    && [...document.querySelectorAll('.fields label')].every((label) => label.scrollWidth <= label.clientWidth)"""
IDLE = "document.getElementById('stop').disabled"


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    assert CHROMIUM is not None
    with running_browser(CHROMIUM) as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab, server: RunningServer) -> Iterator[Tab]:
    """The page, loaded anew and with an empty prefix cache; whatever went wrong in it fails the test."""
    httpx.post(f"{server.url}/flush_cache")
    browser.problems.clear()
    browser.resize(1360, 900)
    browser.prefer("light")
    browser.open(server.url)
    browser.wait_for("document.getElementById('health').textContent === 'ready'")
    browser.wait_for("document.getElementById('tree-now').textContent === 'empty'")
    yield browser
    assert browser.problems == []


def ask(tab: Tab, text: str, max_tokens: int = 8) -> None:
    tab.evaluate(f"document.getElementById('max_tokens').value = {max_tokens}")
    tab.evaluate("document.getElementById('prompt').focus()")
    tab.write(text)
    tab.press("Enter")


def answered(tab: Tab, number: int) -> None:
    tab.wait_for(f"document.querySelectorAll('.message').length === {2 * number} && {IDLE}")


def events(tab: Tab) -> list[str]:
    """Kinds of the tree's events, oldest first."""
    kinds: list[str] = tab.evaluate("[...document.querySelectorAll('#events li')].map((li) => li.dataset.kind)")
    return kinds[::-1]


def test_a_chat_streams_and_tells_what_each_answer_cost(tab: Tab, images: Path | None) -> None:
    ask(tab, "What is the capital of France?")
    answered(tab, 1)
    assert "Paris" in tab.text(".message.assistant p")
    assert "TTFT" in tab.text(".message.assistant .hint") and "(0 cached)" in tab.text(".message.assistant .hint")
    ask(tab, "And of <b>Italy</b>?")
    answered(tab, 2)
    assert "(0 cached)" not in tab.evaluate(FACTS), "the second turn finds the first in the cache"
    assert "<b>Italy</b>" in tab.text(".message.user:nth-child(3) p"), "what users write is text, not HTML"
    tab.wait_for("document.querySelector('#latency td').textContent !== '–'")
    assert tab.evaluate(FITS), "nothing sticks out of its frame"
    if images is not None:
        tab.wait_for("document.querySelectorAll('.node').length > 1")
        tab.screenshot(images / "page.png")


def test_stop_ends_an_answer_here_and_in_the_engine(tab: Tab, server: RunningServer) -> None:
    ask(tab, "Tell me a very long story about a sailor.", max_tokens=2000)
    tab.wait_for("document.querySelector('.message.assistant p').textContent.length > 10")
    tab.wait_for("document.querySelector('#requests .mine') !== null")
    tab.press("Escape")
    tab.wait_for(f"{IDLE} && {FACTS}.endsWith('stopped')")
    server.wait_idle()
    ask(tab, "Thanks.")
    answered(tab, 2)


def test_the_tree_shows_matching_splitting_locking_and_eviction(tab: Tab, server: RunningServer) -> None:
    for end in ("The captain of the first one was afraid of water. " * 3, "Nobody knew where they had come from. " * 3):
        body = {"prompt": "Once upon a time there was a harbour with many ships. " * 3 + end, "max_tokens": 2}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    tab.wait_for("[...document.querySelectorAll('#events li')].filter((li) => li.dataset.kind === 'insert').length > 1")
    assert {"match", "insert", "split", "lock", "unlock"} <= set(events(tab))
    tab.wait_for("document.querySelectorAll('#tree li li .node').length >= 2")
    assert "harbour" in tab.text("#tree > ul > li > .node .text")
    httpx.post(f"{server.url}/flush_cache")
    tab.wait_for("document.querySelector('.node.gone') !== null")
    assert events(tab)[-1] == "evict"


def test_events_can_be_paused_and_stepped_through_with_the_keyboard_alone(tab: Tab, server: RunningServer) -> None:
    def focus(wanted: str) -> None:
        for _ in range(40):
            if tab.evaluate("document.activeElement.id") == wanted:
                return
            tab.press("Tab")
        raise AssertionError(f"{wanted} cannot be reached with the tab key")

    focus("prompt")
    focus("pause")
    tab.press("Enter")
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "one two three " * 9, "max_tokens": 1}, timeout=60)
    tab.wait_for("document.getElementById('queued').textContent !== ''")
    assert events(tab) == [] and not tab.evaluate("document.querySelector('.node')")
    focus("step")
    tab.press("Enter")
    assert events(tab) == ["match"]
    assert "finds nothing" in tab.text("#event-now")
    tab.press(" ")
    assert len(events(tab)) == 2
    focus("live")
    tab.press("Enter")
    tab.wait_for("document.querySelector('.node') !== null && document.getElementById('queued').textContent === ''")


def test_a_phone_and_dark_mode_have_a_page_of_their_own(tab: Tab, images: Path | None) -> None:
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.resize(360, 740, phone=True)
    tab.prefer("dark")
    ask(tab, "Name a colour.")
    answered(tab, 1)
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
    tab.evaluate("document.getElementById('sampling').open = true")
    tab.wait_for("document.querySelector('.node') !== null")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360, "nothing is wider than the phone"
    assert tab.evaluate(FITS)
    tab.evaluate("document.getElementById('sampling').open = false")
    small = "[...document.querySelectorAll('button')].filter((b) => b.offsetParent && b.offsetHeight < 40).length"
    assert tab.evaluate(small) == 0, "fingers can hit the buttons"
    if images is not None:
        tab.screenshot(images / "page_phone_dark.png")


def test_a_server_with_keys_is_asked_with_the_one_that_the_reader_gives(browser: Tab) -> None:
    is_open = "document.getElementById('key-dialog').open"
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder), api_key=("k-one",)) as service:
        browser.open(service.url)
        for key in ("k-wrong", "k-one"):
            browser.wait_for(is_open)
            assert browser.evaluate("document.activeElement.id") == "key"
            browser.write(key)
            browser.press("Enter")
        browser.wait_for(f"!{is_open} && document.getElementById('health').textContent === 'ready'")
        browser.wait_for("document.querySelector('.node .text') !== null")
        assert browser.text(".node .text") == TREE_TEXT, "not HTML, whatever a prompt says"
        ask(browser, "<<<img src=x>&amp;>>", max_tokens=40)
        answered(browser, 1)
        assert browser.text(".message.assistant p") == "<img src=x>&amp;"
        assert "k-one" not in browser.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        ask(browser, "{reject}")
        browser.wait_for(f"{IDLE} && {FACTS} === 'the queue is full'")
        assert browser.evaluate("document.getElementById('prompt').value") == "{reject}", "for another try"
    browser.press("Enter")
    browser.wait_for(f"{IDLE} && {FACTS} === 'the server cannot be reached'")
    browser.wait_for("document.getElementById('health').textContent === 'not connected: the server cannot be reached'")
