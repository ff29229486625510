"""What a newcomer does first: ask the default model with curl and with the openai client."""

import json
import subprocess

import httpx
from openai import OpenAI

from radixserve.tests.e2e.server_process import RunningServer

QUESTION = {"role": "user", "content": "What is the capital of France?"}


def test_curl_streams_the_answer(server: RunningServer) -> None:
    body = json.dumps({"messages": [QUESTION], "stream": True, "temperature": 0})
    command = [
        "curl",
        "-sN",
        f"{server.url}/v1/chat/completions",
        "-H",
        "content-type: application/json",
        "-d",
        body,
    ]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert "Paris" in text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_openai_client_gets_the_same_answer_with_and_without_streaming(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=[QUESTION], temperature=0)
    parts = client.chat.completions.create(model=model, messages=[QUESTION], temperature=0, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
    assert whole.choices[0].message.content == streamed
    assert "Paris" in streamed


def test_second_turn_reports_the_first_as_cached(client: OpenAI, model: str) -> None:
    story = "Remember this list: " + ", ".join(f"item {i} costs {i * 7} coins" for i in range(40))
    messages = [{"role": "user", "content": story}]
    first = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=16)
    answer = first.choices[0].message.content
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And what does item 3 cost?"},
    ]
    second = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=16)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 16, "the whole first prompt, down to a page border, is reused"
    assert cached < second.usage.prompt_tokens


def test_text_completion_continues_the_prompt(client: OpenAI, model: str) -> None:
    done = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=4)
    assert done.choices[0].text.startswith(" Paris")
    assert done.usage.completion_tokens == 4
    assert done.choices[0].finish_reason == "length"


def test_wrong_requests_get_an_openai_error_that_names_the_field(
    server: RunningServer,
) -> None:
    wrong = {
        "temperature": {"messages": [QUESTION], "temperature": -1},
        "messages": {"messages": []},
        "model": {"messages": [QUESTION], "model": "no-such-model"},
        "max_tokens": {"messages": [QUESTION], "max_tokens": 0},
    }
    for field, body in wrong.items():
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=10)
        assert answer.status_code == (404 if field == "model" else 400)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert field in error["message"] or field == error["param"]


def test_too_long_prompt_is_refused_with_both_numbers(server: RunningServer) -> None:
    body = {"prompt": [[28] * 9000], "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=10)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "9000" in error["message"] and "8192" in error["message"]
