"""What the prefix cache finds changes no answer and is told in ``usage``."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from radixserve.tests.contract.api import Api

PAGE = 16
# Words written over and over: made of random words, most texts have near ties.
LESSON = "one apple, two pears, three plums, four figs, five dates; " * 60


@pytest.fixture(scope="module")
def ids(api: Api) -> list[int]:
    return [int(token) for token in api.answer("/tokenize", {"prompt": LESSON})["tokens"]]


def flush(api: Api) -> None:
    assert api.http.post("/flush_cache").status_code == 200


LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 127, 128, 129)


def test_prompt_that_is_cached_whole_still_computes_its_last_token(api: Api, ids: list[int]) -> None:
    flush(api)
    seen = {}
    for length in LENGTHS:
        texts = [api.greedy([ids[:length]], 2) for _ in range(2)]
        assert texts[1].agrees_with(texts[0])
        assert all(text.cached_tokens <= length - 1 for text in texts)
        seen[length] = texts[0]
    for length in reversed(LENGTHS):
        assert api.greedy([ids[:length]], 2).agrees_with(seen[length])
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda _: api.greedy([ids[:128]], 2), range(8)))
    assert all(text.agrees_with(seen[128]) for text in together)


def test_cold_warm_alone_and_together_give_the_same_text(api: Api, ids: list[int]) -> None:
    prompts = [ids[:length] + ids[7 * i : 7 * i + 5] for i, length in enumerate((50, 90, 130, 200))]
    flush(api)
    cold = [api.greedy([prompt], 8) for prompt in prompts]
    warm = [api.greedy([prompt], 8) for prompt in prompts]
    assert all(text.cached_tokens > 0 for text in warm)
    unrelated = [[(31 * n + i) % 4000 + 100 for i in range(40)] for n in range(3)]
    with ThreadPoolExecutor(7) as pool:
        together = list(pool.map(lambda prompt: api.greedy([prompt], 8), prompts + unrelated))
    for texts in zip(cold, warm, together, strict=False):
        assert texts[0].text
        assert all(text.agrees_with(texts[0]) for text in texts)


def test_a_conversation_that_grows_finds_its_turns(api: Api) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": LESSON[:400]}]
    previous = 0
    for turn in range(3):
        answer = api.chat(messages, max_tokens=6)
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= previous // PAGE * PAGE - PAGE
        previous = usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": f"And what is number {turn}?"})


def test_cached_tokens_are_whole_pages_and_salts_share_nothing(api: Api, ids: list[int]) -> None:
    flush(api)

    def cached(prompt: list[int], **fields: Any) -> int:
        usage = api.comp([prompt], max_tokens=1, **fields)["usage"]
        assert usage["prompt_tokens"] == 300 and usage["total_tokens"] == 301
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    prompt = ids[:300]
    assert cached(prompt) == 0
    again = cached(prompt)
    assert 240 <= again < 300 and again % PAGE == 0
    assert cached(ids[:150] + ids[3:153]) <= 150
    assert cached(prompt, cache_salt="aaa") == 0
    assert cached(prompt, cache_salt="aaa") > 0
    assert cached(prompt, cache_salt="bbb") == 0
    assert cached(prompt, cache_salt="") > 0, "an empty salt is none"


def test_choices_of_one_prompt_compute_it_once(api: Api, ids: list[int]) -> None:
    flush(api)
    before = api.server.stats()
    api.comp([ids[:300]], n=4, max_tokens=2, temperature=1)
    after = api.server.stats()
    computed = after["prompt_tokens"] - before["prompt_tokens"] - (after["cached_tokens"] - before["cached_tokens"])
    assert computed < 2 * 300
