"""Real clients against the real server: what they send is understood, what they get they can read."""

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from radixserve.tests.contract.api import Api

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def model(api: Api) -> str:
    name: str = api.http.get("/v1/models").json()["data"][0]["id"]
    return name


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.server.url}/v1", api_key="none", max_retries=0, timeout=60) as own:
        yield own


@pytest.fixture(scope="module")
def answer(client: openai.OpenAI, model: str) -> str:
    text = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY).choices[0].message.content
    assert text and "Paris" in text
    return text


def test_openai_streams_what_it_would_have_got_whole(client: openai.OpenAI, model: str, answer: str) -> None:
    usage = {"include_usage": True}
    with client.chat.completions.create(
        model=model, messages=QUESTION, stream=True, stream_options=usage, **GREEDY
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8
    with client.chat.completions.stream(model=model, messages=QUESTION, **GREEDY) as events:
        assert events.get_final_completion().choices[0].message.content == answer


def test_openai_reads_the_raw_streaming_response(client: openai.OpenAI, model: str) -> None:
    create = client.chat.completions.with_streaming_response.create
    with create(model=model, messages=QUESTION, stream=True, **GREEDY) as response:
        assert response.headers["x-request-id"]
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    raw = client.chat.completions.with_raw_response.create(model=model, messages=QUESTION, **GREEDY)
    assert raw.parse().object == "chat.completion"


def test_openai_types_fit_log_probabilities_and_completions(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(model=model, messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    assert [len(token.top_logprobs) for token in chat.choices[0].logprobs.content] == [2] * 7, "the end is not seen"
    done = client.completions.create(model=model, prompt=["One, two,", "A, B,"], logprobs=1, echo=True, **GREEDY)
    assert [choice.index for choice in done.choices] == [0, 1]
    assert done.choices[0].text.startswith("One, two,")


def test_openai_raises_the_error_that_fits(client: openai.OpenAI, model: str) -> None:
    wrong: list[tuple[type[openai.APIStatusError], dict[str, Any]]] = [
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 9000}]}),
        (openai.NotFoundError, {"model": "no-such-model"}),
    ]
    for kind, fields in wrong:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                client.chat.completions.create(**{"model": model, "messages": QUESTION, "stream": stream, **fields})
            assert caught.value.message
            assert isinstance(caught.value.body, dict) and caught.value.body["message"]


async def test_async_openai_streams_and_cancels(api: Api, model: str, answer: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.server.url}/v1", api_key="none", max_retries=0, timeout=60) as own:
        stream = await own.chat.completions.create(model=model, messages=QUESTION, stream=True, **GREEDY)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == answer
        long = {**GREEDY, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        streams = await own.chat.completions.create(model=model, messages=QUESTION, stream=True, **long)
        await anext(aiter(streams))
        await streams.close()
        whole = asyncio.create_task(own.chat.completions.create(model=model, messages=QUESTION, **long))
        await asyncio.sleep(0.5)
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
    await asyncio.to_thread(api.server.wait_idle, 5)


@pytest.mark.filterwarnings("ignore")  # of packages that come along
def test_langchain_chats_and_streams(langchain: Callable[..., Any], answer: str) -> None:
    chat = langchain(max_tokens=8, stream_usage=True)
    said = chat.invoke([("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"), *_turns()])
    assert said.content == answer
    assert said.usage_metadata is not None and said.usage_metadata["output_tokens"] == 8
    assert said.response_metadata["finish_reason"] == "stop"
    parts = list(chat.stream(_turns()))
    assert "".join(str(part.content) for part in parts) == answer
    assert sum((part.usage_metadata or {"output_tokens": 0})["output_tokens"] for part in parts) == 8
    assert [str(one.content) for one in chat.batch([_turns(), _turns()])] == [answer, answer]


def _turns() -> list[tuple[str, str]]:
    return [("human", QUESTION[0]["content"])]


@pytest.mark.filterwarnings("ignore")
def test_litellm_chats_streams_and_maps_errors(
    api: Api, model: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network for prices
    import litellm

    call: dict[str, Any] = {"api_base": f"{api.server.url}/v1", "api_key": "none", "messages": QUESTION, **GREEDY}
    for provider in ("openai", "hosted_vllm"):
        name = f"{provider}/{model}"
        whole = litellm.completion(model=name, num_retries=0, **call)
        assert whole.choices[0].message.content == answer
        assert whole.usage.completion_tokens == 8
        parts = litellm.completion(model=name, stream=True, stream_options={"include_usage": True}, **call)
        chunks = list(parts)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model=f"openai/{model}", num_retries=0, **{**call, "temperature": -1})


def test_curl_gets_chunks_and_json_errors(api: Api, answer: str) -> None:
    def curl(body: dict[str, Any]) -> str:
        url, form = f"{api.server.url}/v1/chat/completions", "content-type: application/json"
        command = ["curl", "-sSN", "--max-time", "60", url, "-H", form, "-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = {"messages": QUESTION, **GREEDY}
    assert json.loads(curl(body))["choices"][0]["message"]["content"] == answer
    events = [line.removeprefix("data: ") for line in curl({**body, "stream": True}).splitlines() if line]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events) == answer
    assert json.loads(curl({"messages": []}))["error"]["param"] == "messages"


def test_fields_that_clients_add_by_themselves_are_accepted(api: Api, answer: str, model: str) -> None:
    extras = {
        "user": "u-1",
        "metadata": {},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "Paris"},
        "parameters": {"max_new_tokens": 60},
        "foo": 1,
    }
    response = httpx.post(
        f"{api.server.url}/v1/chat/completions",
        json={"model": model, "messages": QUESTION, **GREEDY, **extras},
        timeout=60,
    )
    assert response.json()["choices"][0]["message"]["content"] == answer
    assert response.headers["x-radixserve-ignored-fields"] == "parameters,foo"
