"""Answers of the generation routes: their shapes, whole and streamed, and that both tell the same."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from radixserve.tests.server.clients import streamed_chunks
from radixserve.tests.server.service import CHAT, COMPLETIONS, Service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=20) as openai_client:
        yield openai_client


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"<<{text}>>"}], **fields}


def prompt(text: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"<<{text}>>", **fields}


def deltas(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
    return [text for text in texts if text]


def test_chat_answer_has_openai_shape(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=ask("hello")).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "hello"
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6, "five letters and the end"
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_every_answer_has_its_own_id(http: httpx.Client) -> None:
    ids = {http.post(path, json=body).json()["id"] for path, body in [(CHAT, ask("a")), (COMPLETIONS, prompt("a"))] * 3}
    assert len(ids) == 6


@pytest.mark.parametrize("stream", [False, None])
def test_no_stream_unless_asked(http: httpx.Client, stream: bool | None) -> None:
    answer = http.post(CHAT, json=ask("hello", stream=stream, max_tokens=3))
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_chat_stream_grammar(http: httpx.Client) -> None:
    chunks = streamed_chunks(http, CHAT, ask("hello", max_tokens=4))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    first, *rest = (chunk["choices"][0] for chunk in chunks)
    assert first["delta"]["role"] == "assistant"
    assert not any("role" in choice["delta"] for choice in rest)
    assert [choice["finish_reason"] for choice in [first, *rest]] == [None] * 5 + ["length"]
    assert deltas(chunks) == ["h", "e", "l", "l"], "a chunk a token"
    assert all("usage" not in chunk for chunk in chunks)


def test_completion_stream_grammar(http: httpx.Client) -> None:
    chunks = streamed_chunks(http, COMPLETIONS, prompt("hello"))
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all(isinstance(chunk["choices"][0]["text"], str) for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
def test_no_usage_in_streams_unless_asked(http: httpx.Client, options: dict[str, Any] | None) -> None:
    for chunk in streamed_chunks(http, CHAT, ask("hello", stream_options=options)):
        assert chunk.get("usage") is None
        assert chunk["choices"]


def test_usage_chunk_is_the_last_and_equal_to_the_whole_answers(http: httpx.Client) -> None:
    http.post(CHAT, json=ask("hello"))
    whole = http.post(CHAT, json=ask("hello")).json()
    *others, last = streamed_chunks(http, CHAT, ask("hello", stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in others)


def test_continuous_usage_grows_with_the_answer(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed_chunks(http, COMPLETIONS, prompt("hello", stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_cached_tokens_are_reported_and_salted(http: httpx.Client) -> None:
    def cached(**fields: Any) -> int:
        usage = http.post(COMPLETIONS, json=prompt("cache me", **fields)).json()["usage"]
        assert usage["prompt_tokens"] == 12
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [
        0,
        11,
        0,
        11,
        0,
    ]


@pytest.mark.parametrize(
    "text", ["😀🎉🚀 日本語", "čřž\t\n", " lead  and trail ", 'quote" back\\slash \u2028 \x01', "e\u0301🙂"]
)
@pytest.mark.parametrize("kind", [CHAT, COMPLETIONS])
def test_stream_is_the_whole_text_and_never_half_a_character(http: httpx.Client, kind: str, text: str) -> None:
    body = ask(text) if kind == CHAT else prompt(text)
    whole = http.post(kind, json=body).json()["choices"][0]
    pieces = deltas(streamed_chunks(http, kind, body))
    assert "".join(pieces) == text
    assert (whole["text"] if kind == COMPLETIONS else whole["message"]["content"]) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_incomplete_character_at_the_limit_is_one_replacement(http: httpx.Client) -> None:
    body = prompt("é", max_tokens=1)
    assert http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "\ufffd"
    assert deltas(streamed_chunks(http, COMPLETIONS, body)) == ["\ufffd"]


STOPS = [
    ("the quick brown fox", ["brown"], "the quick ", "stop"),
    ("the quick brown fox", "quick", "the ", "stop"),
    ("the quick brown fox", ["\x07zz", "own f"], "the quick br", "stop"),
    ("the quick brown fox", ["a", "b", "c", "d", "fox"], "the qui", "stop"),
    ("the quick brown fox", ["the"], "", "stop"),
    ("the quick brown fox", ["foxy", "x\x07"], "the quick brown fox", "stop"),
    ("aaab", ["aab"], "a", "stop"),
    ("日本語", ["本"], "日", "stop"),
]


@pytest.mark.parametrize(("text", "stop", "expected", "reason"), STOPS)
def test_stop_strings_cut_alike_whole_and_streamed(
    http: httpx.Client, service: Service, text: str, stop: Any, expected: str, reason: str
) -> None:
    whole = http.post(CHAT, json=ask(text, stop=stop)).json()
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["choices"][0]["finish_reason"] == reason
    assert whole["usage"]["completion_tokens"] >= 1
    chunks = streamed_chunks(http, CHAT, ask(text, stop=stop))
    assert "".join(deltas(chunks)) == expected
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == [reason]
    service.wait_until(lambda: not service.engine.running)


def test_stop_string_ends_the_request_in_the_engine(http: httpx.Client, service: Service) -> None:
    body = {**prompt("abc ", stop="cab", ignore_eos=True, request_id="stopped"), "prompt": "{slow}<<abc >>"}
    body["stop"] = "c a"
    assert http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "ab"
    service.wait_until(lambda: "stopped" in service.engine.aborted)


def test_stop_string_is_shown_if_asked_for(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json=prompt("the end of it", stop="end", include_stop_str_in_output=True)).json()
    assert answer["choices"][0]["text"] == "the end"
    assert answer["choices"][0]["stop_reason"] == "end"


def test_stop_token_ends_the_text_and_is_named(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json=prompt("abcd", stop_token_ids=[99])).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["stop_reason"] == 99
    assert answer["usage"]["completion_tokens"] == 3


def test_several_choices_stream_side_by_side(http: httpx.Client, service: Service) -> None:
    body = ask("word", n=3, seed=5, stream_options={"include_usage": True})
    chunks = streamed_chunks(http, CHAT, body)
    for index in range(3):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert sum("role" in choice["delta"] for choice in own) == 1
        assert [bool(choice["finish_reason"]) for choice in own] == [False] * (len(own) - 1) + [True]
        assert "".join(deltas(chunks, index)) == "word"
    assert {c["index"] for chunk in chunks for c in chunk["choices"]} == {0, 1, 2}
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 15
    assert usage["prompt_tokens"] == http.post(CHAT, json=ask("word")).json()["usage"]["prompt_tokens"]
    assert [submit.sampling.seed for submit in service.engine.submits[-4:-1]] == [5, 6, 7]


def test_several_prompts_each_have_their_choices(http: httpx.Client) -> None:
    body = {"prompt": ["<<one>>", "<<two>>"], "n": 2}
    answer = http.post(COMPLETIONS, json=body).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    assert answer["usage"]["prompt_tokens"] == 14
    ids = http.post(COMPLETIONS, json={"prompt": [list(b"<<one>>"), list(b"<<two>>")]}).json()
    assert [choice["text"] for choice in ids["choices"]] == ["one", "two"]


def test_chat_logprobs(http: httpx.Client) -> None:
    for top in (None, 0, 3):
        body = ask("hé", logprobs=True, top_logprobs=top)
        whole = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in whole] == [[104], [195], [169]], "one entry per visible token"
        assert [len(entry["top_logprobs"]) for entry in whole] == [top or 0] * 3
        assert all(-9999.0 <= t["logprob"] <= 0 for entry in whole for t in [entry, *entry["top_logprobs"]])
        streamed = [c["choices"][0]["logprobs"] for c in streamed_chunks(http, CHAT, body)]
        assert [entry for part in streamed if part for entry in part["content"]] == whole
    assert http.post(CHAT, json=ask("hé")).json()["choices"][0]["logprobs"] is None


def test_logprobs_end_where_a_stop_string_cuts(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=ask("abcdef", logprobs=True, stop="cd")).json()["choices"][0]
    assert [entry["token"] for entry in answer["logprobs"]["content"]] == ["a", "b"]
    chunks = streamed_chunks(http, CHAT, ask("abcdef", logprobs=True, stop="cd"))
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in streamed] == ["a", "b"]


def test_completion_logprobs_are_parallel_lists(http: httpx.Client) -> None:
    body = {"prompt": "é<<hé>>", "logprobs": 2, "echo": True}
    choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
    assert choice["text"] == "é<<hé>>hé"
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {12}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert logprobs["tokens"][3:5] == ["<", "h"]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])


def test_echo_streams_the_prompt_first(http: httpx.Client) -> None:
    assert "".join(deltas(streamed_chunks(http, COMPLETIONS, prompt("abc", echo=True)))) == "<<abc>>abc"
    ids = {"prompt": list(b"<<abc>>"), "echo": True}
    assert http.post(COMPLETIONS, json=ids).json()["choices"][0]["text"] == "<<abc>>abc"


def test_prompt_is_scored_without_generating(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json=prompt("abc", echo=True, max_tokens=0, logprobs=1)).json()
    assert answer["choices"][0]["text"] == "<<abc>>"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None] + [-0.5] * 6
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_extension(http: httpx.Client) -> None:
    body = prompt("a", prompt_logprobs=1)
    entries = http.post(COMPLETIONS, json=body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1]["60"] == {"logprob": -0.5, "rank": 1, "decoded_token": "<"}


def test_token_ids_extension(http: httpx.Client) -> None:
    choice = http.post(COMPLETIONS, json=prompt("ab", return_token_ids=True)).json()["choices"][0]
    assert choice["token_ids"] == [97, 98, 256]
    assert bytes(choice["prompt_token_ids"]) == b"<<ab>>"
    chunks = streamed_chunks(http, CHAT, ask("ab", return_token_ids=True))
    assert sum((chunk["choices"][0].get("token_ids", []) for chunk in chunks), []) == [97, 98, 256]
    assert chunks[0]["prompt_token_ids"]


def test_tool_turns_in_the_history_never_print_none(http: httpx.Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": '{"city":"Oslo"}'}}
    counts = set()
    for content in ({"content": None}, {"content": ""}, {}):
        assistant = {"role": "assistant", "tool_calls": [call], **content}
        tool = {"role": "tool", "tool_call_id": "call_1", "content": "5 C"}
        messages = [{"role": "user", "content": "weather?"}, assistant, tool, {"role": "user", "content": "thanks"}]
        rendered = http.post(f"{CHAT}/render", json={"messages": messages}).json()
        assert "None" not in rendered["prompt"]
        assert '{"city": "Oslo"}' in rendered["prompt"]
        counts.add(http.post(CHAT, json={"messages": messages}).json()["usage"]["prompt_tokens"])
    assert len(counts) == 1


def test_control_token_text_of_users_is_only_text(http: httpx.Client) -> None:
    def count(path: str, body: dict[str, Any]) -> int:
        return int(http.post(path, json=body).json()["usage"]["prompt_tokens"])

    plain = count(CHAT, {"messages": [{"role": "user", "content": "x"}]})
    typed = count(CHAT, {"messages": [{"role": "user", "content": "x" + "<|im_end|>" * 3}]})
    assert typed - plain == 30
    assert count(COMPLETIONS, {"prompt": "<|im_end|>" * 3}) == 3


def test_template_refusal_is_the_clients_error(http: httpx.Client) -> None:
    body = {"messages": [{"role": "tool", "content": "boom"}]}
    for stream in (False, True):
        answer = http.post(CHAT, json={**body, "stream": stream})
        assert answer.status_code == 400
        assert "NO-TOOLS" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_full_queue_is_a_status_also_for_streams(http: httpx.Client, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "{reject}"}], "prompt": "{reject}"}
    for stream in (False, True):
        answer = http.post(path, json={**body, "stream": stream})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "2"
        assert answer.json()["error"]["code"] == "queue_full"


def test_error_in_mid_stream_is_one_event_and_the_end(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "{fail}<<abcdef>>", "stream": True})
    *chunks, error, end = answer.text.split("\n\n")
    assert end == ""
    assert "not finite" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert all(json.loads(c.removeprefix("data: "))["choices"][0]["finish_reason"] is None for c in chunks)
    assert "[DONE]" not in answer.text
    assert http.post(COMPLETIONS, json={"prompt": "{fail}<<abcdef>>"}).status_code == 500


def test_openai_client_streams_and_reads_errors(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "<<hello>>"}]
    stream = client.chat.completions.create(
        model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=messages, temperature=-1, stream=True)
    assert "temperature" in error.value.message
    with pytest.raises(openai.APIError, match="finite"):
        list(client.completions.create(model="tiny", prompt="{fail}<<abcdef>>", stream=True))
    assert client.models.list().data[0].id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
