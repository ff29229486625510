"""/v1/responses: what its items become, what its answers and events look like, and what it refuses."""

import functools
import json
from typing import Any

import httpx
import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from radixserve.tests.server.clients import connect, named_events, request_bytes, vanish
from radixserve.tests.server.fake_engine import THOUGHT, TWO_CALLS
from radixserve.tests.server.service import Service

RESPONSES = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}} for name in ("add", "now")
]


def ask(said: str, **fields: Any) -> dict[str, Any]:
    return {"input": f"<<{said}{' ' * said.endswith('>')}>>", **fields}


def answer(own: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = own.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    Response.model_validate(whole)
    return whole


@functools.cache  # it takes a second to build
def _known_events() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


def events(own: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each must be one that the openai client knows, under its name, and numbered."""
    found = named_events(own, RESPONSES, body)
    for event in found:
        _known_events().validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def shape(found: list[dict[str, Any]]) -> list[str]:
    """The kinds of events, without their repetitions."""
    kinds = [event["type"].removeprefix("response.") for event in found]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]


def test_a_plain_answer_says_what_was_asked_and_used(own: httpx.Client) -> None:
    body = ask("Hi there", metadata={"a": "b"}, temperature=0.5, store=True, instructions="Be kind.")
    first, again = answer(own, body), answer(own, body)
    assert first["id"].startswith("resp_") and first["status"] == "completed" and first["error"] is None
    (item,) = first["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hi there", "annotations": [], "logprobs": []}]
    assert (first["metadata"], first["temperature"], first["store"]) == ({"a": "b"}, 0.5, False)
    usage = again["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1
    assert usage["output_tokens"] == len("Hi there") + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_events_of_text_come_in_order_and_end_with_the_whole_answer(own: httpx.Client) -> None:
    found = events(own, ask("Hello"))
    assert shape(found) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in found if event["type"].endswith("text.delta")) == "Hello"
    whole = answer(own, ask("Hello"))
    last = found[-1]["response"]
    for told in (last, whole):
        for key in ("id", "created_at", "completed_at", "usage"):
            del told[key]
        del told["output"][0]["id"]
    assert last == whole


def test_reasoning_and_calls_are_items_of_their_own(own: httpx.Client) -> None:
    text = THOUGHT + "\n" + TWO_CALLS
    found = events(own, ask(text, tools=TOOLS))
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert found[-1]["response"]["output"] == items
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert [(item["name"], item["arguments"]) for item in items[2:]] == [("add", '{"n": 1}'), ("now", "{}")]
    assert len({item["id"] for item in items}) == 4 and len({item["call_id"] for item in items[2:]}) == 2
    assert [event["output_index"] for event in found if event["type"] == "response.output_item.added"] == [0, 1, 2, 3]
    grown = [e["delta"] for e in found if e["type"].endswith("arguments.delta") and e["output_index"] == 2]
    assert len(grown) > 3 and "".join(grown) == '{"n": 1}'
    whole = answer(own, ask(text, tools=TOOLS))
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in items]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 10
    assert whole["tools"][0]["name"] == "add"


def test_an_answer_that_meets_the_limit_is_incomplete(own: httpx.Client) -> None:
    whole = answer(own, ask("abcdef", max_output_tokens=3))
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete" and whole["output"][0]["content"][0]["text"] == "abc"
    assert shape(events(own, ask("abcdef", max_output_tokens=3)))[-1] == "incomplete"


def test_a_limit_inside_the_reasoning_leaves_an_incomplete_item(own: httpx.Client) -> None:
    body = ask(THOUGHT, max_output_tokens=THOUGHT.index("see"))
    for whole in (answer(own, body), events(own, body)[-1]["response"]):
        (item,) = whole["output"]
        assert (whole["status"], item["type"], item["status"]) == ("incomplete", "reasoning", "incomplete")
        assert item["content"] == [{"type": "reasoning_text", "text": "Let me"}]
        assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]


def test_a_call_cut_at_the_limit_is_no_text(own: httpx.Client) -> None:
    body = ask(TWO_CALLS, tools=TOOLS, max_output_tokens=TWO_CALLS.index('add"'))
    for whole in (answer(own, body), events(own, body)[-1]["response"]):
        (item,) = whole["output"]
        assert (whole["status"], item["content"][0]["text"]) == ("incomplete", "I call.")


def test_an_empty_answer_is_an_empty_message(own: httpx.Client) -> None:
    assert answer(own, ask(""))["output"][0]["content"][0]["text"] == ""
    assert "output_item.done" in shape(events(own, ask("")))


def test_streams_that_fail_say_so_last(own: httpx.Client) -> None:
    found = events(own, ask("Hello{fail}"))
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"
    assert [item["status"] for item in found[-1]["response"]["output"]] == ["incomplete"]
    refusal = own.post(RESPONSES, json=ask("{reject}", stream=True))
    assert refusal.status_code == 429 and refusal.json()["error"]["code"] == "queue_full"


def sent_prompt(own: httpx.Client, thinker: Service, body: dict[str, Any]) -> str:
    answer(own, body)
    ids = memoryview(thinker.engine.submits[-1].prompt_ids).cast("i")
    return "".join(chr(i) if i < 256 else "|" for i in ids)


def test_items_become_the_turns_of_a_chat(own: httpx.Client, thinker: Service) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}, {"type": "input_text", "text": "on"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I call."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"n": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    prompt = sent_prompt(own, thinker, {"input": items, "instructions": "Be kind."})
    assert prompt == (
        "|system\nBe kind.\n\nBe brief.|\n|user\ngo\non|\n|assistant\nI call."
        '{"n": 1}{}|\n|tool\n2|\n|tool\nnoon|\n|assistant\n'
    )


def test_formats_efforts_and_choices_reach_the_engine_and_are_told(own: httpx.Client, thinker: Service) -> None:
    form = {"type": "json_schema", "name": "p", "schema": {"type": "object", "properties": {"x": {"const": 7}}}}
    whole = answer(own, ask("x", text={"format": form}, reasoning={"effort": "low", "summary": "auto"}, top_p=0.5))
    assert '"const": 7' in json.dumps(json.loads(str(thinker.engine.submits[-1].sampling.grammar)))
    assert (whole["text"], whole["reasoning"]["effort"], whole["top_p"]) == ({"format": form}, "low", 0.5)
    choice = {"type": "function", "name": "now"}
    assert answer(own, ask("x", tools=TOOLS, tool_choice=choice))["tool_choice"] == choice
    grammar = str(thinker.engine.submits[-1].sampling.grammar)
    assert "now" in grammar and "add" not in grammar


def test_what_is_not_supported_is_refused_by_name(own: httpx.Client) -> None:
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"input": image}, "input[0].content[0].type", "input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the item"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "web_search_call"),
        ({"input": []}, "input", "not empty"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items"),
        ({"conversation": "c"}, "conversation", "stored"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
        ({"tool_choice": {"type": "file_search"}, "tools": TOOLS}, "tool_choice", "function"),
        ({"tool_choice": {"type": "function", "name": "no"}, "tools": TOOLS}, "tool_choice", "'no'"),
        ({"background": True}, "background", "background"),
        ({"truncation": "auto"}, "truncation", "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema", "not"),
        ({"max_output_tokens": 100000}, "max_output_tokens", "max_output_tokens"),
        ({"input": "x" * 600}, "input", "context length"),
        ({"temperature": 9}, "temperature", "temperature"),
    ]
    for fields, param, naming in wrong:
        for stream in (False, True):
            response = own.post(RESPONSES, json={**ask("x"), "stream": stream, **fields})
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] == param and naming in error["message"], error


def test_unknown_fields_are_named_in_a_header(own: httpx.Client) -> None:
    response = own.post(RESPONSES, json=ask("x", surprise=1, store=True, include=["reasoning.encrypted_content"]))
    assert response.headers["x-radixserve-ignored-fields"] == "surprise"


def test_a_client_that_leaves_ends_its_response(thinker: Service) -> None:
    for stream in (False, True):
        body = {"input": "{slow}<<a>>", "ignore_eos": True, "stream": stream, "request_id": f"left-{stream}"}
        leaver = connect(thinker)
        leaver.sendall(request_bytes(RESPONSES, body))
        thinker.wait_until(lambda: bool(thinker.engine.running))
        vanish(leaver, "FIN")
        thinker.wait_until(lambda: not thinker.engine.running and thinker.frontend.num_active == 0)
    assert {"left-False", "left-True"} <= set(thinker.engine.aborted)


class Point(BaseModel):
    x: int


def test_openai_client_streams_calls_and_parses(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", tools=TOOLS, **ask(THOUGHT + TWO_CALLS)) as stream:
        final = stream.get_final_response()
    assert final.output_text == "Yes.I call."
    assert [item.name for item in final.output if item.type == "function_call"] == ["add", "now"]
    history = [{"role": "user", "content": "<<ok>>"}, *final.output]
    history += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "1"}
        for item in final.output
        if item.type == "function_call"
    ]
    assert client.responses.create(model="tiny", input=history).output_text == "ok"  # type: ignore[arg-type]
    parsed = client.responses.parse(model="tiny", text_format=Point, **ask('{"x": 1}'))
    assert parsed.output_parsed == Point(x=1)
