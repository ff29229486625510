"""Wrong requests: an OpenAI error that names the field, the same for streams, and nobody else notices."""

import math
from typing import Any

import httpx
import pytest

from radixserve.tests.server.service import CHAT, COMPLETIONS, Service

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": HI, "max_tokens": 4, **fields}


def comp(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "hi", "max_tokens": 4, **fields}


def both(**fields: Any) -> list[tuple[str, dict[str, Any]]]:
    return [chat(**fields), comp(**fields)]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def nested(depth: int) -> dict[str, Any]:
    """A schema of lists in lists."""
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "string"}


def check_error(answer: httpx.Response, status: int, field: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    if field is not None:
        assert error["param"] is not None and error["param"].startswith(field)
        assert field in error["message"]
    return error


WRONG = {
    "max_tokens": [c for v in (0, -1, -186, 1.5, True, "7", 10**9, 2**63, 10**30) for c in both(max_tokens=v)],
    "max_completion_tokens": [chat(max_completion_tokens=v) for v in (0, -3, True, 2.5, 10**9)],
    "min_tokens": [c for v in (-1, 5, True) for c in both(min_tokens=v)],
    "temperature": [c for v in (-0.1, 2.1, True, "1", [1]) for c in both(temperature=v)],
    "top_p": [c for v in (-1, 1.1, False) for c in both(top_p=v)],
    "top_k": [c for v in (-2, 1.5, True) for c in both(top_k=v)],
    "min_p": both(min_p=1.5),
    "presence_penalty": both(presence_penalty=9),
    "frequency_penalty": both(frequency_penalty=-2.5),
    "repetition_penalty": [c for v in (0, -1, 11) for c in both(repetition_penalty=v)],
    "seed": [c for v in (1.5, "x", 2**63) for c in both(seed=v)],
    "n": [c for v in (0, -1, 129, True, 1.0) for c in both(n=v)],
    "stream": [c for v in ("yes", 1) for c in both(stream=v)],
    "stream_options": [c for v in ([], {"include_usage": 1}) for c in both(stream=True, stream_options=v)],
    "stop": [
        c
        for v in ("", [""], ["zzz", ""], [1], {"a": 1}, 5, [str(i) for i in range(129)], "x" * 16_385)
        for c in both(stop=v)
    ],
    "stop_token_ids": [c for v in ([262], [-1], ["a"], 5) for c in both(stop_token_ids=v)],
    "logit_bias": [
        c
        for v in (
            {"262": -100},
            {"999999": 5},
            {"-1": 5},
            {"abc": 1},
            {"1_0": 1},
            {"5": 101},
            {"5": -101},
            {"5": None},
            {"5": "x"},
            [],
            "x",
        )
        for c in both(logit_bias=v)
    ],
    "logprobs": [comp(logprobs=v) for v in (1000000, -1, 21, True)] + [chat(logprobs=v) for v in (1, "true")],
    "top_logprobs": [chat(logprobs=True, top_logprobs=v) for v in (1000000, -1, 21, True)] + [chat(top_logprobs=2)],
    "prompt_logprobs": [*both(prompt_logprobs=-1), *both(prompt_logprobs=21), *both(prompt_logprobs=1, stream=True)],
    "priority": both(priority="high"),
    "cache_salt": [c for v in (5, "x" * 1025) for c in both(cache_salt=v)],
    "request_id": [c for v in ("", "a b", "x" * 200, "a\nb", 5) for c in both(request_id=v)],
    "response_format": [
        c
        for v in (
            {"type": "yaml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "object"}}}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(70)}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 140_000]}}},
            {"type": "structural_tag", "format": "x"},
            "text",
            [],
        )
        for c in both(response_format=v)
    ],
    "tools": [chat(tools=v) for v in ([{"type": "function"}], [{"type": "x"}], [tool("a b")], [tool("f")] * 2, "f")],
    "tool_choice": [
        *(chat(tool_choice=v) for v in ("required", {"type": "function", "function": {"name": "f"}})),
        *(chat(tools=[tool("f")], tool_choice=v) for v in ("sometimes", 1, {"type": "function"}, tool("g"))),
    ],
    "thinking_token_budget": [chat(thinking_token_budget=v) for v in (-1, "x")],
    "structured_outputs": [
        c
        for v in ({"regex": 5}, {"choice": []}, {"nothing": 1}, {"json": "{"}, {"regex": "a", "choice": ["b"]}, "x")
        for c in both(structured_outputs=v)
    ],
    "guided_json": both(guided_json="{") + both(guided_json={"type": "array", "contains": {}}),
    "guided_regex": both(guided_regex="a", response_format={"type": "json_object"}),
    "functions": [chat(functions=[{"name": "f"}])],
    "modalities": [chat(modalities=["text", "audio"])],
    "web_search_options": [chat(web_search_options={})],
    "suffix": [comp(suffix="end")],
    "bad_words": both(bad_words=["x"]),
    "allowed_token_ids": both(allowed_token_ids=[1]),
    "truncate_prompt_tokens": both(truncate_prompt_tokens=8),
    "chat_template": [chat(chat_template="x")],
    "documents": [chat(documents=[{"text": "x"}])],
    "moderation": [chat(moderation={"model": "x"})],
    "best_of": [comp(best_of=3)],
    "messages": [
        chat(messages=v)
        for v in (
            None,
            [],
            {},
            "hi",
            [{}],
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": 5}],
            [{"role": "wizard", "content": "x"}],
            [{"content": "x"}],
            [None],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        )
    ],
    "continue_final_message": [
        chat(continue_final_message=True, add_generation_prompt=True, messages=[{"role": "assistant", "content": "x"}]),
        chat(continue_final_message=True),
    ],
    "prompt": [
        comp(prompt=v)
        for v in (None, "", [], {}, 5, [1.5], [True, False], [[]], ["a", 1], [[1], ["a"]], [262], [-1], [2**40])
    ],
    "model": [c for v in (5, ["tiny"]) for c in both(model=v)],
}
CASES = [(field, path, body) for field, bodies in WRONG.items() for path, body in bodies]


@pytest.mark.parametrize(("field", "path", "body"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_wrong_field_is_named(http: httpx.Client, field: str, path: str, body: dict[str, Any]) -> None:
    error = check_error(http.post(path, json=body), 400, field)
    streamed = check_error(http.post(path, json={**body, "stream": body.get("stream", True)}), 400)
    assert streamed["param"] == error["param"]


def test_option_of_structured_outputs_without_effect_here_is_refused_by_name(http: httpx.Client) -> None:
    for path, body in both(structured_outputs={"json": {"type": "integer"}, "disable_any_whitespace": True}):
        message = check_error(http.post(path, json=body), 400, "structured_outputs.disable_any_whitespace")["message"]
        assert "is not supported" in message


def test_schema_of_neither_kind_is_named_as_the_body_has_it(http: httpx.Client) -> None:
    for path, body in both(guided_json=5):
        assert check_error(http.post(path, json=body), 400, "guided_json")["param"] == "guided_json"


@pytest.mark.parametrize("wrong", ["a" * 600, [97] * 600, [97, 262], "", []])
def test_of_several_prompts_the_wrong_one_is_named(http: httpx.Client, wrong: Any) -> None:
    right = "a" if isinstance(wrong, str) else [97]
    error = check_error(http.post(COMPLETIONS, json={"prompt": [right, right, wrong]}), 400, "prompt[2]")
    assert error["param"] == "prompt[2]"


def test_huge_max_tokens_names_the_context_length(http: httpx.Client) -> None:
    for path, body in both(max_tokens=10**9):
        assert "512" in check_error(http.post(path, json=body), 400)["message"]


RIGHT = [
    *both(max_tokens=None),
    *both(max_tokens=512),
    chat(max_completion_tokens=2),
    *both(stop=[]),
    *both(stop=None),
    *both(stop=list("vwxyz")),
    *both(logit_bias={}),
    *both(logit_bias={"5": -100, "6": 3.5}),
    *both(temperature=0),
    *both(temperature=2),
    *both(top_k=-1),
    *both(top_k=9999999),
    *both(top_p=1e-9),
    *both(seed=-5),
    *both(stream_options={}),
    *both(stream_options={"include_usage": True}),
    *both(response_format={"type": "text"}),
    *both(response_format={"type": "json_object"}),
    *both(structured_outputs={"choice": ["yes", "no"], "disable_fallback": False}),
    chat(tools=[tool("f")], parallel_tool_calls=False),
    chat(tools=[tool("f")], tool_choice=tool("f")),
    *both(user="u-1", metadata={}, store=False, service_tier="auto"),
    chat(tools=[], tool_choice="none", parallel_tool_calls=True),
    chat(messages=[{"role": "system", "content": "Be terse."}]),
    chat(messages=[{"role": "user", "content": ""}]),
    chat(messages=[{"role": "developer", "content": "x"}, *HI]),
    chat(messages=[*HI, {"role": "assistant", "content": "x"}]),
    chat(messages=[*HI, *HI, {"role": "assistant", "content": "x"}, *HI]),
    comp(prompt=[1, 2, 3]),
    comp(prompt=["a", "b"], best_of=1),
    *both(model="tiny"),
    *both(model=None),
    *both(priority=-3, cache_salt="s", request_id="abc-1"),
]


@pytest.mark.parametrize(("path", "body"), RIGHT, ids=range(len(RIGHT)))
def test_right_request_is_answered(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


OPTIONAL = """stop n seed logprobs top_logprobs top_p stream stream_options presence_penalty frequency_penalty
logit_bias user tools tool_choice response_format max_tokens temperature model"""


def test_null_is_the_same_as_absent(http: httpx.Client) -> None:
    plain = http.post(CHAT, json={"messages": HI}).json()
    nulls = http.post(CHAT, json={"messages": HI, **dict.fromkeys(OPTIONAL.split())}).json()
    assert nulls["choices"] == plain["choices"]


def test_unknown_fields_are_ignored_and_named_in_a_header(http: httpx.Client) -> None:
    path, body = chat(foo=1, parameters={"max_new_tokens": 60}, user="u", **{"bad\r\nname": 1, "名前": 2})
    answer = http.post(path, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-radixserve-ignored-fields"] == "foo,parameters"
    assert "x-radixserve-ignored-fields" not in http.post(*chat()[:1], json=chat()[1]).headers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["no-such-model", ""])
def test_wrong_model_is_not_found(http: httpx.Client, path: str, name: str) -> None:
    body = dict([chat(), comp()])[path]
    for stream in (False, True):
        error = check_error(http.post(path, json={**body, "model": name, "stream": stream}), 404, "model")
        assert error["code"] == "model_not_found"


NOT_JSON = {
    "broken": b"{bad",
    "empty": b"",
    "array": b"[]",
    "null": b"null",
    "string": b'"x"',
    "trailing comma": b'{"prompt": "x",}',
    "byte FF": b'{"prompt": "\xff"}',
    "deep": b"[" * 100_000,
    "deep value": b'{"prompt": ' + b"[" * 100_000,
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinite": b'{"prompt": "x", "temperature": 1e999}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", NOT_JSON)
def test_body_that_is_no_json_object_is_refused_and_the_connection_lives(
    http: httpx.Client, path: str, name: str
) -> None:
    check_error(http.post(path, content=NOT_JSON[name], headers={"content-type": "application/json"}), 400)
    assert http.post(*comp()[:1], json=comp()[1]).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/json; charset=utf-8", "Application/JSON"])
def test_any_content_type_will_do(http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", CHAT, 405, "this route takes POST, not GET"),
        ("DELETE", COMPLETIONS, 405, "this route takes POST, not DELETE"),
        ("POST", "/health", 405, "this route takes GET, not POST"),
        ("GET", "/v1/nope", 404, "no such route; /openapi.json lists those there are"),
        ("POST", "/v1/nope", 404, "no such route; /openapi.json lists those there are"),
    ],
)
def test_wrong_route_or_method_is_an_openai_error_with_the_right_one(
    http: httpx.Client, method: str, path: str, status: int, message: str
) -> None:
    assert check_error(http.request(method, path), status)["message"] == message
    assert CHAT in http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("length", [512, 513, 1024, 100_000])
@pytest.mark.parametrize("as_text", [False, True])
def test_too_long_prompt_is_refused_with_both_numbers(http: httpx.Client, length: int, as_text: bool) -> None:
    prompt: Any = "a" * length if as_text else [[97] * length]
    for stream in (False, True):
        error = check_error(http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, "stream": stream}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert str(length) in error["message"] or "at least" in error["message"]


def test_tokens_are_limited_to_the_room_left(http: httpx.Client, service: Service) -> None:
    for asked in (None, 8, 512):
        body = {"prompt": [97] * 508, "max_tokens": asked, "ignore_eos": True, "min_tokens": asked and 8}
        answer = http.post(COMPLETIONS, json=body).json()
        assert answer["usage"]["total_tokens"] == 512
        assert answer["choices"][0]["finish_reason"] == "length"
    body = {"prompt": [97] * 511, "max_tokens": 1}
    assert http.post(COMPLETIONS, json=body).json()["usage"]["completion_tokens"] == 1


def test_sampling_parameters_reach_the_engine(http: httpx.Client, service: Service) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.25,
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "logit_bias": {"5": 1.5},
        "stop_token_ids": [260],
    }
    http.post(COMPLETIONS, json={"prompt": "hi", "n": 2, "seed": 2**63 - 1, "cache_salt": "s", "priority": -4, **asked})
    first, second = service.engine.submits[-2:]
    expected = {**asked, "logit_bias": {5: 1.5}, "stop_token_ids": (260,)}
    assert {name: getattr(first.sampling, name) for name in asked} == expected
    assert (first.sampling.seed, second.sampling.seed) == (2**63 - 1, -(2**63))
    assert (first.namespace, first.priority) == ("s", -4)
    assert math.isclose(second.sampling.temperature, 0.5)
