"""Sampling fields, penalties and log-probabilities of the real model, alone and side by side in one batch."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from radixserve.engine.text.text_model import TextModel
from radixserve.tests.contract.api import CHAT, COMPLETIONS, Api, as_text, chat_body, comp_body, refused, text_of

NUMBERS = "1 2 3 4 5"
CAT = "the cat sat on the mat. the cat sat on"
PENALTIES = {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 2}
LOGPROBS: dict[str, Any] = {"max_tokens": 12, "logprobs": 2, "return_token_ids": True}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_one_token_is_one_token(api: Api, path: str) -> None:
    body = chat_body("test", max_tokens=1) if path == CHAT else comp_body("test", max_tokens=1)
    whole = api.answer(path, body)
    assert whole["usage"]["completion_tokens"] == 1
    assert whole["choices"][0]["finish_reason"] == "length"
    assert api.streamed(path, body)[1] == "length"


def test_max_completion_tokens_wins(api: Api) -> None:
    assert api.chat("Count.", max_tokens=9, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


def test_extreme_values_mix_in_one_batch_and_leave_greedy_ones_alone(api: Api, text_model: TextModel) -> None:
    solo = api.greedy(NUMBERS, 8)
    hot: dict[str, Any] = {"temperature": 1, "top_p": 1}
    greedy_by_rule = [{**hot, "top_k": 1}, {**hot, "top_p": 1e-9}, {**hot, "temperature": 1e-6}, {**hot, "top_p": 0}]
    sizes = (0, -1, text_model.tokenizer.vocab_size, 9999999)
    others = [{**hot, "top_k": k} for k in sizes] + [
        {**hot, "temperature": 2.0},
        {**hot, "min_p": 0},
        {**hot, "presence_penalty": 2},
        {"min_p": 1.0, **hot},
    ]
    fields = [{}, *others, {}, *greedy_by_rule, {}]

    def ask(extra: dict[str, Any]) -> Any:
        return api.comp(NUMBERS, **{**LOGPROBS, "max_tokens": 8, **extra})

    with ThreadPoolExecutor(len(fields)) as pool:
        answers = list(pool.map(ask, fields))
    assert all(answer["usage"]["completion_tokens"] <= 8 for answer in answers)
    for extra, answer in zip(fields, answers, strict=True):
        if not extra or extra in greedy_by_rule:
            assert as_text(answer).agrees_with(solo), extra


def test_penalties_of_one_request_change_no_other(api: Api) -> None:
    plain, penal = api.greedy(CAT, 12), api.greedy(CAT, 12, **PENALTIES)
    assert plain.tokens != penal.tokens
    rng = random.Random(1)
    mixed = [({}, plain), (PENALTIES, penal)] * 4
    for _ in range(2):
        rng.shuffle(mixed)
        with ThreadPoolExecutor(len(mixed)) as pool:
            texts = list(pool.map(lambda one: api.greedy(CAT, rng.choice((3, 12)), **one[0]), mixed))
        assert all(text.agrees_with(expected) for text, (_, expected) in zip(texts, mixed, strict=True))
    assert api.greedy(CAT, 12).agrees_with(plain)


def test_forced_token_is_all_there_is(api: Api, text_model: TextModel) -> None:
    (yes,) = text_model.encode_prompt(" yes")
    assert text_of(api.comp("Well,", max_tokens=5, logit_bias={str(yes): 100})) == " yes" * 5


def test_chat_logprobs_of_every_visible_token(api: Api) -> None:
    for top in (None, 0, 5):
        body = chat_body("hi", max_tokens=4, logprobs=True, top_logprobs=top)
        whole = api.answer(CHAT, body)["choices"][0]
        entries = whole["logprobs"]["content"]
        assert bytes(sum((entry["bytes"] for entry in entries), [])).decode() == whole["message"]["content"]
        for entry in entries:
            best = [other["logprob"] for other in entry["top_logprobs"]]
            assert len(best) == (top or 0) and best == sorted(best, reverse=True)
            assert not best or abs(best[0] - entry["logprob"]) < 1e-4, "greedy takes the first"
            assert all(value <= 0 for value in [*best, entry["logprob"]])
        streamed = [c["logprobs"]["content"] for e in api.events(CHAT, body) for c in e["choices"] if c["logprobs"]]
        assert [entry["token"] for part in streamed for entry in part] == [entry["token"] for entry in entries]
    assert api.chat("hi", max_tokens=2, logprobs=False)["choices"][0]["logprobs"] is None


MASKS = [{"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 0.01}, {"echo": True}, {"masked": True}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_log_probabilities_are_finite_json(api: Api, mask: dict[str, Any]) -> None:
    prompt = "correct horse battery staple"
    fields = dict(mask)
    if fields.pop("masked", False):
        likeliest = api.comp(prompt, max_tokens=1, logprobs=3, return_token_ids=True)["choices"][0]
        names = likeliest["logprobs"]["top_logprobs"][0]
        ids = [api.answer("/tokenize", {"prompt": name})["tokens"][0] for name in names]
        fields["logit_bias"] = {str(token): -100 for token in ids}
    body = comp_body(prompt, **{"max_tokens": 6, "logprobs": 5, **fields})
    for raw in (api.post(COMPLETIONS, body), api.post(COMPLETIONS, {**body, "stream": True})):
        assert raw.status_code == 200
        documents = [line.removeprefix("data: ") for line in raw.text.splitlines() if line.startswith(("data: {", "{"))]
        assert documents
        for document in documents:
            choice = json.loads(document, parse_constant=_no_constant)["choices"][0]
            lists = choice["logprobs"] or {}
            assert len({len(values) for values in lists.values()}) <= 1
            assert all(value is None or value <= 0 for value in lists.get("token_logprobs", []))


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_echo_scores_the_prompt_and_offsets_point_into_the_text(api: Api) -> None:
    prompt = "The capital of France is čřž"
    choice = api.comp(prompt, max_tokens=3, echo=True, logprobs=1)["choices"][0]
    assert choice["text"].startswith(prompt)
    lists = choice["logprobs"]
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    scored = api.comp(prompt, max_tokens=0, echo=True, logprobs=1)
    assert scored["choices"][0]["text"] == prompt
    assert scored["choices"][0]["logprobs"]["tokens"] == lists["tokens"][:-3]
    assert scored["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_tell_ranks(api: Api) -> None:
    whole = api.chat("The capital of France is Paris.", max_tokens=1, prompt_logprobs=2)
    first, *entries = whole["prompt_logprobs"]
    assert first is None and len(entries) == whole["usage"]["prompt_tokens"] - 1
    for entry in entries:
        own, *others = entry.values()
        assert [other["rank"] for other in others] in ([1, 2], [1], [2])
        assert (own["rank"] <= 2) == (len(entry) == 2)
        assert all(other["logprob"] <= own["logprob"] for other in others if other["rank"] > own["rank"])


def test_stop_ids_and_minimum_lengths(api: Api, text_model: TextModel) -> None:
    paris = text_model.encode_prompt(" Paris")[0]
    choice = api.comp("The capital of France is", max_tokens=8, stop_token_ids=[paris])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", paris)
    later = api.comp("The capital of France is", max_tokens=8, stop_token_ids=[paris], min_tokens=3)
    assert later["usage"]["completion_tokens"] >= 3
    question = "What is the capital of France?"
    natural = api.chat(question, max_tokens=14)["usage"]["completion_tokens"]
    longer = api.chat(question, max_tokens=14, ignore_eos=True)["usage"]["completion_tokens"]
    assert natural < longer == 14


def test_bad_token_ids_and_logprobs_are_refused_while_a_neighbour_streams(api: Api, text_model: TextModel) -> None:
    known = api.greedy("Once upon a time", 24).text
    size = text_model.tokenizer.vocab_size
    wrong: list[dict[str, Any]] = [
        *({"logit_bias": {str(token): 5}} for token in (size, 999999, -1)),
        {"top_k": -2},
        {"temperature": 3},
        {"top_logprobs": 21, "logprobs": True},
    ]
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(api.streamed, COMPLETIONS, comp_body("Once upon a time", max_tokens=24))
        for fields in wrong:
            refused(api.post(CHAT, chat_body("hi", max_tokens=5, **fields)))
        deep = json.loads('{"a":' * 500 + "1" + "}" * 500)
        for schema in ({"type": "yaml"}, {"type": "json_schema", "json_schema": deep}):
            refused(api.post(CHAT, chat_body("hi", response_format=schema)), naming="response_format")
        assert "".join(neighbour.result()[0]) == known
