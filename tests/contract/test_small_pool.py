"""A KV pool of 1024 tokens and steps of 64: shortage, eviction, chunk borders, and clients that leave."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from radixserve.tests.contract.api import CHAT, COMPLETIONS, Api, chat_body, comp_body, launched, refused
from radixserve.tests.contract.load import Leaver, Reader, storm

POOL = 1024
FILL = 950
CHUNK = 64


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with launched("--num-pages", str(POOL // 16), "--max-num-batched-tokens", str(CHUNK)) as running:
        yield running
        running.server.wait_idle()


@pytest.fixture(scope="module")
def words(api: Api) -> list[int]:
    text = "red, green, blue, black, white; " * 200
    return [int(token) for token in api.answer("/tokenize", {"prompt": text})["tokens"]]


def holds_everything(api: Api) -> bool:
    stats = api.server.wait_idle()
    return stats["kv_free_tokens"] + stats["kv_evictable_tokens"] == stats["kv_total_tokens"]


def test_what_never_fits_is_refused_and_what_outgrows_the_pool_ends(api: Api, words: list[int]) -> None:
    too_long = (words * 2)[:2000]
    refused(api.post(COMPLETIONS, comp_body([too_long], max_tokens=4)), naming=str(POOL))
    refused(api.post(COMPLETIONS, {**comp_body([too_long], max_tokens=4), "stream": True}), naming=str(POOL))
    chat = api.post(CHAT, chat_body("word " * 2000, max_tokens=4))
    assert refused(chat, naming=str(POOL))["param"] == "messages"
    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(api.comp, [too_long[: POOL - 40]], max_tokens=3000, ignore_eos=True)
        others = [pool.submit(api.is_alive) for _ in range(2)]
        assert all(other.result() for other in others)
        whole = long.result()
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["total_tokens"] <= POOL
    assert holds_everything(api)


def test_prefix_that_another_request_inserts_meanwhile(api: Api, words: list[int]) -> None:
    for start in (1, 2):
        prompt = [words[start : start + 128]]
        solo = api.greedy(prompt, 8)
        assert api.http.post("/flush_cache").status_code == 200
        with ThreadPoolExecutor(12) as pool:
            twins = [pool.submit(api.greedy, prompt, 8) for _ in range(4)]
            time.sleep(0.05)
            others = [pool.submit(api.comp, [words[50 + i : 70 + i]], max_tokens=2) for i in range(8)]
            assert all(twin.result().agrees_with(solo) for twin in twins)
            assert all(other.result() for other in others)
        assert holds_everything(api)


def test_nothing_is_found_under_an_evicted_key(api: Api, words: list[int]) -> None:
    assert api.http.post("/flush_cache").status_code == 200
    rng = random.Random(3)
    prompts = [[rng.choice(words[:40])] + words[i : i + 100 + 20 * i] for i in range(3)]
    cold = [api.greedy([prompt], 6) for prompt in prompts]
    evicted = api.server.stats()["evicted_tokens"]
    api.comp([[9] + (words * 3)[:FILL]], max_tokens=1)
    assert api.server.stats()["evicted_tokens"] > evicted
    for prompt, before in zip(prompts, cold, strict=True):
        again, warm = api.greedy([prompt], 6), api.greedy([prompt], 6)
        assert again.cached_tokens < warm.cached_tokens
        assert again.agrees_with(before) and warm.agrees_with(before)


def test_cached_prefixes_meet_chunk_borders(api: Api, words: list[int]) -> None:
    for salt, (first, more) in enumerate(((63, 1), (64, 1), (64, 64), (65, 63), (128, 2), (127, 65))):
        cold = api.greedy([words[: first + more]], 2, cache_salt=f"cold{salt}")
        api.comp([words[:first]], max_tokens=1, cache_salt=f"warm{salt}")
        warm = api.greedy([words[: first + more]], 2, cache_salt=f"warm{salt}")
        assert warm.cached_tokens == min(first, first + more - 1) // 16 * 16
        assert warm.agrees_with(cold)


def test_load_with_shared_prefixes_and_eviction(api: Api, words: list[int]) -> None:
    prompts = [words[i % 8 : i % 8 + 80] + words[i : i + 8] for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda prompt: api.comp([prompt], max_tokens=3, ignore_eos=True), prompts))
    assert all(answer["usage"]["completion_tokens"] == 3 for answer in answers)
    assert holds_everything(api)


@pytest.mark.parametrize(("share", "how"), [(0.1, "fin"), (0.5, "rst"), (0.9, "fin")])
def test_abort_in_the_middle_of_a_chunked_prefill(api: Api, words: list[int], share: float, how: str) -> None:
    solo = api.greedy("Once upon a time", 16)
    engine = api.server.engine_pid()
    neighbour = Reader(api, comp_body("Once upon a time", max_tokens=16))
    neighbour.wait_for(2)
    before = api.server.stats()["prompt_tokens"]
    prompt = [[7, int(share * 100)] + words[:600]]
    leaver = Leaver(api, COMPLETIONS, {**comp_body(prompt, max_tokens=50), "stream": how == "fin"})
    while api.server.stats()["prompt_tokens"] == before:
        time.sleep(0.01)
    time.sleep(share)
    leaver.leave(how)
    assert neighbour.text() == solo.text
    assert holds_everything(api)
    assert api.server.engine_pid() == engine


def test_long_prompts_leave_tokens_for_a_running_stream_and_short_ones(api: Api, words: list[int]) -> None:
    victim = Reader(api, comp_body("Once upon a time", max_tokens=60, ignore_eos=True))
    victim.wait_for(5)
    with ThreadPoolExecutor(3) as pool:
        with frozen(api.server.engine_pid()):  # what is sent meanwhile arrives together, however fast the machine is
            seen = len(victim.lines)
            longs = [pool.submit(api.comp, [[token] + words[:420]], max_tokens=1) for token in (5, 6)]
            time.sleep(0.2)
            short = pool.submit(api.is_alive)
            time.sleep(0.2)
        assert short.result()
        assert not all(long.done() for long in longs), "a short request passes long prompts"
        assert all(long.result() for long in longs)
        # 840 tokens are at least 13 chunks, and every step has a token for the stream.
        assert len(victim.lines) - seen >= 8 or victim.lines[-1] == "[DONE]"
    assert victim.text()


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_abort_storm_leaves_nothing(api: Api) -> None:
    process = psutil.Process(api.server.process.pid)
    descriptors = _descriptors(process)
    storm(api, num_clients=40, at_once=20, seed=5)
    assert holds_everything(api)
    size = api.server.log_path.stat().st_size
    time.sleep(1)
    assert api.server.log_path.stat().st_size - size < 1000
    assert abs(_descriptors(process) - descriptors) <= 5


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_three_full_abort_storms_leave_no_memory_behind(api: Api, words: list[int]) -> None:
    sizes = []
    for seed in range(3):
        storm(api, num_clients=400, at_once=50, seed=seed)
        assert holds_everything(api)
        sizes.append(sum(child.memory_info().rss for child in psutil.Process(api.server.process.pid).children(True)))
    assert sizes[2] < 1.1 * sizes[0]
    assert api.comp([(words * 5)[:FILL]], max_tokens=1)["usage"]["prompt_tokens"] == FILL


def _descriptors(process: psutil.Process) -> int:
    pids = [process.pid, *(child.pid for child in process.children(recursive=True))]
    return sum(len(os.listdir(Path("/proc") / str(pid) / "fd")) for pid in pids)
