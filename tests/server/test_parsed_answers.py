"""Answers with reasoning and tool calls: their shapes, whole and streamed, and in the eyes of the openai client."""

import json
from typing import Any

import httpx
import openai
import pydantic

from radixserve.tests.server.clients import streamed_chunks
from radixserve.tests.server.fake_engine import THOUGHT, TWO_CALLS
from radixserve.tests.server.service import CHAT, Service

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    }
    for name in ("add", "now")
]


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"<<{text} >>"}], **fields}


def message(own: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = own.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]["message"]
    return found


def test_calls_stand_beside_the_content(own: httpx.Client) -> None:
    answer = own.post(CHAT, json=ask(TWO_CALLS, tools=TOOLS)).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] == "I call."
    calls = answer["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "add", "arguments": '{"n": 1}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)


def test_content_is_null_only_beside_calls(own: httpx.Client) -> None:
    only_call = '<tool_call>{"name": "now"}</tool_call>'
    assert message(own, ask(only_call, tools=TOOLS))["content"] is None
    assert message(own, ask("", tools=TOOLS))["content"] == " "


def test_without_tools_and_with_choice_none_calls_are_text(own: httpx.Client) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        found = message(own, ask(TWO_CALLS, **fields))
        assert "tool_calls" not in found and found["content"].startswith(TWO_CALLS)


def test_a_call_cut_at_the_limit_is_no_content(own: httpx.Client) -> None:
    body = ask(TWO_CALLS, tools=TOOLS, max_completion_tokens=TWO_CALLS.index('add"'))
    answer = own.post(CHAT, json=body).json()["choices"][0]
    assert answer["message"]["content"] == "I call." and "tool_calls" not in answer["message"]
    chunks = [chunk["choices"][0] for chunk in streamed_chunks(own, CHAT, body)]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "I call."
    assert answer["finish_reason"] == chunks[-1]["finish_reason"] == "length"


def test_one_call_at_most_where_parallel_calls_are_off(own: httpx.Client) -> None:
    found = message(own, ask(TWO_CALLS, tools=TOOLS, parallel_tool_calls=False))
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["add"]


def test_streamed_calls_begin_once_and_their_arguments_grow(own: httpx.Client) -> None:
    chunks = streamed_chunks(own, CHAT, ask(TWO_CALLS, tools=TOOLS))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "I call."
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", [])]
    starts = [piece for piece in pieces if "id" in piece]
    assert [(start["index"], start["function"]["name"]) for start in starts] == [(0, "add"), (1, "now")]
    assert all("name" not in piece["function"] for piece in pieces if piece not in starts)
    grown = [piece["function"]["arguments"] for piece in pieces if piece["index"] == 0]
    assert len(grown) > 3 and "".join(grown) == '{"n": 1}'
    assert choices[-1]["finish_reason"] == "tool_calls" and choices[-1]["delta"] == {}


def test_reasoning_is_apart_and_counted(own: httpx.Client) -> None:
    whole = own.post(CHAT, json=ask(THOUGHT)).json()
    assert whole["choices"][0]["message"]["content"] == "Yes. "
    assert whole["choices"][0]["message"]["reasoning_content"] == "Let me see."
    assert whole["choices"][0]["message"]["reasoning"] == "Let me see."
    block = THOUGHT.partition("</think>")[0] + "</think>"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(block) - len("<think>") + 1
    *chunks, last = streamed_chunks(own, CHAT, ask(THOUGHT, stream_options={"include_usage": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes. "
    assert last["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]


def test_a_limit_or_a_stop_inside_the_reasoning_leaves_no_content(own: httpx.Client) -> None:
    num_tokens = THOUGHT.index("see")
    for fields, reason in (({"max_tokens": num_tokens}, "length"), ({"stop": "see"}, "stop")):
        whole = own.post(CHAT, json=ask(THOUGHT, **fields)).json()
        (choice,) = whole["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == (reason, "")
        assert choice["message"]["reasoning_content"] == "Let me"
        used = whole["usage"]["completion_tokens"]
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == used - len("<think>") + 1
        chunks = [chunk["choices"][0] for chunk in streamed_chunks(own, CHAT, ask(THOUGHT, **fields))]
        assert "".join(chunk["delta"].get("reasoning_content") or "" for chunk in chunks) == "Let me"
        assert not any(chunk["delta"].get("content") for chunk in chunks)
        assert chunks[-1]["finish_reason"] == reason


def test_calls_may_follow_the_reasoning_at_once_in_every_choice(own: httpx.Client) -> None:
    text = f"<think>Hm.</think>{TWO_CALLS.removeprefix('I call.')}"
    whole = own.post(CHAT, json=ask(text, tools=TOOLS, n=2)).json()
    one = own.post(CHAT, json=ask(text, tools=TOOLS)).json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * one > 0
    for choice in whole["choices"]:
        found = choice["message"]
        assert (found["reasoning_content"], found["content"], choice["finish_reason"]) == ("Hm.", None, "tool_calls")
        assert [call["function"]["name"] for call in found["tool_calls"]] == ["add", "now"]
    chunks = [
        choice for chunk in streamed_chunks(own, CHAT, ask(text, tools=TOOLS, n=2)) for choice in chunk["choices"]
    ]
    for index in (0, 1):
        deltas = [chunk["delta"] for chunk in chunks if chunk["index"] == index]
        starts = [call for delta in deltas for call in delta.get("tool_calls", []) if "id" in call]
        assert [(call["index"], call["function"]["name"]) for call in starts] == [(0, "add"), (1, "now")]


def test_reasoning_can_be_left_out_or_left_in(own: httpx.Client) -> None:
    hidden = message(own, ask(THOUGHT, include_reasoning=False))
    assert hidden["content"] == "Yes. " and "reasoning_content" not in hidden
    streamed = streamed_chunks(own, CHAT, ask(THOUGHT, include_reasoning=False))
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in streamed)
    assert message(own, ask(THOUGHT, separate_reasoning=False))["content"] == THOUGHT + " "


def test_logprobs_and_ids_of_all_tokens_come_with_the_deltas(own: httpx.Client) -> None:
    body = ask(THOUGHT, logprobs=True, return_token_ids=True)
    whole = own.post(CHAT, json=body).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in streamed_chunks(own, CHAT, body)]
    listed = [entry for choice in chunks if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert listed == whole["logprobs"]["content"]
    assert [i for choice in chunks for i in choice.get("token_ids", [])] == whole["token_ids"]


def test_stop_strings_end_parsed_answers(own: httpx.Client) -> None:
    answer = own.post(CHAT, json=ask(THOUGHT, stop="es")).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"], answer["stop_reason"]) == ("Y", "stop", "es")
    cut = own.post(CHAT, json=ask(TWO_CALLS, tools=TOOLS, stop='"now"')).json()["choices"][0]
    assert [call["function"]["name"] for call in cut["message"]["tool_calls"]] == ["add"]


def test_grammars_reach_the_engine_and_are_blamed_by_the_field_of_the_request(
    own: httpx.Client, thinker: Service
) -> None:
    fields = {"response_format": {"type": "json_object"}}
    own.post(CHAT, json=ask("x", **fields))
    sent = thinker.engine.submits[-1].sampling.grammar
    assert sent is not None and json.loads(sent)["type"] == "structural_tag"
    own.post("/v1/completions", json={"prompt": "x", "regex": "a+"})
    assert "a+" in str(thinker.engine.submits[-1].sampling.grammar)
    error = own.post(CHAT, json=ask("{badgrammar}", **fields)).json()["error"]
    assert error["param"] == "response_format" and error["message"].startswith("response_format: cannot")


def test_openai_client_reads_streamed_calls_and_parses_them(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "tools": TOOLS, **ask(TWO_CALLS)}
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(**fields).choices[0]
    for choice in (final, whole):
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        called = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]  # type: ignore[union-attr]
        assert called == [("add", {"n": 1}), ("now", {})]


class Sum(pydantic.BaseModel):
    n: int


def test_openai_client_parses_arguments_into_models(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Sum, name="add")]
    fields: Any = {"model": "tiny", "tools": tools, **ask(TWO_CALLS)}
    calls = client.chat.completions.parse(**fields).choices[0].message.tool_calls
    assert calls and calls[0].function.parsed_arguments == Sum(n=1)


def test_history_of_calls_and_tools_reaches_a_template_that_knows_none(http: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    body = {"messages": messages, "tools": TOOLS}
    prompt = http.post("/v1/chat/completions/render", json=body).json()["prompt"]
    assert prompt.count("<|im_start|>system") == 1 and "Be kind." in prompt
    assert all(json.dumps(tool) in prompt for tool in TOOLS)
    assert '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>' in prompt
    assert "<tool_response>\n3\n</tool_response>" in prompt
