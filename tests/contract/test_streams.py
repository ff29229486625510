"""Streams of the real model: stop strings over several tokens, characters of several tokens, events, usage, choices."""

import time
from typing import Any

import httpx
import pytest

from radixserve.engine.text.text_model import TextModel
from radixserve.tests.contract.api import CHAT, COMPLETIONS, Api, chat_body, comp_body, text_of

ALPHABET = comp_body("Here is the alphabet: A B C D E F", max_tokens=24)
CAPITAL = comp_body("The capital of France is", max_tokens=8)
BELL = "\x07"


@pytest.fixture(scope="module")
def alphabet(api: Api) -> str:
    return text_of(api.answer(COMPLETIONS, ALPHABET))


@pytest.fixture(scope="module")
def stop(alphabet: str, text_model: TextModel) -> str:
    """A part of the text, some way in, that several tokens make and that does not come earlier."""
    for start in range(3, len(alphabet) - 8):
        part = alphabet[start : start + 8]
        if alphabet.index(part) == start and len(text_model.encode_prompt(part)) >= 3:
            return part
    raise AssertionError(f"no stop string in {alphabet!r}")


@pytest.mark.parametrize("others", [[], [BELL + "zz"], ["a", "b", "c", "d"]])
def test_stop_string_of_several_tokens_is_never_shown(api: Api, alphabet: str, stop: str, others: list[str]) -> None:
    others = [other for other in others if other not in alphabet]
    kept = alphabet[: alphabet.index(stop)]
    body = {**ALPHABET, "stop": [*others, stop]}
    whole = api.answer(COMPLETIONS, body)
    assert (text_of(whole), whole["choices"][0]["finish_reason"]) == (kept, "stop")
    pieces, reason = api.streamed(COMPLETIONS, body)
    assert ("".join(pieces), reason) == (kept, "stop")


def test_stop_string_that_is_never_completed_is_released_in_time(api: Api, alphabet: str, stop: str) -> None:
    pieces, reason = api.streamed(COMPLETIONS, {**ALPHABET, "stop": stop + BELL})
    assert ("".join(pieces), reason) == (alphabet, "length")
    assert len(pieces) >= 3


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stop_at_the_very_start_leaves_an_empty_string(api: Api, path: str) -> None:
    body = CAPITAL if path == COMPLETIONS else chat_body("What is the capital of France?", max_tokens=8)
    stopped = {**body, "stop": text_of(api.answer(path, body))[:3]}
    whole = api.answer(path, stopped)
    assert text_of(whole) == ""
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] >= 1
    assert api.streamed(path, stopped) == ([], "stop")


def test_output_that_only_begins_a_stop_string_is_all_shown(api: Api) -> None:
    body = {**CAPITAL, "max_tokens": 2}
    text = text_of(api.answer(COMPLETIONS, body))
    body["stop"] = text + BELL * 2
    assert text_of(api.answer(COMPLETIONS, body)) == text
    pieces, reason = api.streamed(COMPLETIONS, body)
    assert ("".join(pieces), reason) == (text, "length")


def test_characters_of_several_tokens_come_whole(api: Api) -> None:
    body = comp_body(["😀🎉🚀" * 6, "日本語" * 6, "čřž" * 8, "한국어" * 6, "नमस्ते " * 5], max_tokens=16)
    wholes = [choice["text"] for choice in api.answer(COMPLETIONS, body)["choices"]]
    assert sum(not whole.isascii() for whole in wholes) >= 2, "these prompts should go on in their alphabets"
    pieces: list[list[str]] = [[] for _ in wholes]
    for event in api.events(COMPLETIONS, body):
        for choice in event["choices"]:
            pieces[choice["index"]].append(choice["text"])
    assert ["".join(own) for own in pieces] == wholes
    # A token limit may cut the last character; nothing else does.
    assert not any("\ufffd" in whole[:-1] for whole in wholes)


def test_natural_end_is_a_stop_and_shows_no_control_token(api: Api) -> None:
    whole = api.chat("Reply with the single word OK.", max_tokens=200)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert "<|" not in text_of(whole)
    assert abs(whole["created"] - time.time()) < 60


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_comes_last_and_only_where_it_was_asked_for(api: Api, options: dict[str, Any] | None) -> None:
    body = chat_body("Count from 1 to 50.", max_tokens=3)
    whole = api.answer(CHAT, body)
    *others, last = api.events(CHAT, {**body, "stream_options": options})
    if options and options["include_usage"]:
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [last["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
        assert last["choices"] == []
    else:
        others.append(last)
    assert all(event.get("usage") is None and event["choices"] for event in others)


def test_choices_stream_side_by_side_and_differ(api: Api) -> None:
    body = chat_body("Write one random word.", n=3, max_tokens=8, temperature=1.5, top_p=1)
    events = api.events(CHAT, {**body, "seed": 11, "stream_options": {"include_usage": True}})
    texts = []
    for index in range(3):
        own = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [c["delta"].get("role") for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [c["finish_reason"] is not None for c in own] == [False] * (len(own) - 1) + [True]
        texts.append("".join(c["delta"].get("content") or "" for c in own))
    assert len(set(texts)) > 1
    usage = events[-1]["usage"]
    assert usage["prompt_tokens"] == api.count("Write one random word.")
    assert usage["completion_tokens"] <= 24
    again = api.answer(CHAT, {**body, "seed": 11})
    assert [choice["message"]["content"] for choice in again["choices"]] == texts, "a seed gives the same again"
    second = api.answer(CHAT, {**body, "seed": 12, "n": 1})
    assert text_of(second) == texts[1], "choice i of a seed is choice 0 of the seed i later"


def test_prompts_of_a_list_stream_under_their_own_index(api: Api) -> None:
    prompts = ["The capital of France is", "1, 2, 3, 4,"]
    body = comp_body(prompts, max_tokens=4)
    whole = [choice["text"] for choice in api.answer(COMPLETIONS, body)["choices"]]
    texts = ["", ""]
    for event in api.events(COMPLETIONS, body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == whole
    assert "Paris" in texts[0] and "5" in texts[1]


def test_tokens_come_one_by_one_and_not_at_the_end(api: Api) -> None:
    body = {**comp_body("Once upon a time", max_tokens=24, ignore_eos=True), "stream": True}
    seen = []
    with httpx.stream("POST", api.server.url + COMPLETIONS, json=body, timeout=60) as stream:
        for data in stream.iter_raw():
            seen.append(data)
    assert len(seen) >= 10, "a chunk a token, unless this reader is too slow for that"
