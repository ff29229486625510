"""/v1/messages: what its turns become, what its answers and events look like, and what it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from radixserve.tests.server.byte_model import TEMPLATE, write_byte_model
from radixserve.tests.server.clients import connect, named_events, request_bytes, vanish
from radixserve.tests.server.fake_engine import THOUGHT, TWO_CALLS
from radixserve.tests.server.service import Service, running_service

MESSAGES = "/v1/messages"
KEY = "k-1"
TOOLS: list[Any] = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("add", "now")]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = Path(tmp_path_factory.mktemp("m"))
    template = TEMPLATE + "{% if tools %}T{% endif %}{% if enable_thinking is false %}N{% endif %}"
    model = write_byte_model(folder / "model", template=template)
    with running_service(folder, model=str(model), reasoning_parser="qwen3", api_key=(KEY,)) as running:
        yield running


@pytest.fixture(scope="module")
def own(thinker: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=thinker.url, headers={"x-api-key": KEY}, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(thinker: Service) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinker.url, api_key=KEY, max_retries=0, timeout=20) as anthropic_client:
        yield anthropic_client


def ask(text: str, **fields: Any) -> dict[str, Any]:
    content = f"<<{text}{' ' * text.endswith('>')}>>"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 400, **fields}


def answer(own: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = own.post(MESSAGES, json=body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    Message.model_validate(whole)
    return whole


def events(own: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each must be one that the anthropic client knows, under its name."""
    found = named_events(own, MESSAGES, body)
    for event in found:
        if event["type"] != "error":
            EVENT.validate_python(event)
    return found


def test_a_plain_answer_tells_what_was_cached(own: httpx.Client) -> None:
    body = ask("Hi there", system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}])
    first, again = answer(own, body), answer(own, body)
    assert first["id"].startswith("msg_") and first["content"] == [{"type": "text", "text": "Hi there"}]
    assert (first["stop_reason"], first["stop_sequence"]) == ("end_turn", None)
    assert first["usage"]["cache_read_input_tokens"] == 0
    assert again["usage"]["input_tokens"] == 1
    assert again["usage"]["cache_read_input_tokens"] == first["usage"]["input_tokens"] - 1
    assert again["usage"]["output_tokens"] == len("Hi there") + 1


def test_events_of_every_kind_of_block_come_in_order(own: httpx.Client) -> None:
    body = ask(THOUGHT + "\n" + TWO_CALLS, tools=TOOLS)
    first, *found, delta, last = events(own, body)
    assert first["type"] == "message_start" and first["message"]["usage"]["input_tokens"] > 0
    whole = answer(own, body)
    kinds = ["thinking", "text", "tool_use", "tool_use"]
    for index, block in enumerate(whole["content"]):
        start, *deltas, stop = (event for event in found if event["index"] == index)
        assert (start["type"], stop["type"]) == ("content_block_start", "content_block_stop")
        assert start["content_block"]["type"] == block["type"] == kinds[index]
        key = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[block["type"]]
        grown = "".join(event["delta"][key] for event in deltas)
        assert json.loads(grown) == block["input"] if block["type"] == "tool_use" else grown == block[key]
    assert [event["index"] for event in found] == sorted(event["index"] for event in found)
    assert [block["name"] for block in whole["content"][2:]] == ["add", "now"]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and last == {"type": "message_stop"}
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert delta["usage"]["output_tokens_details"]["thinking_tokens"] > 10


def test_stop_reasons_tell_what_ended_the_answer(own: httpx.Client) -> None:
    for fields, text, reason, sequence in (
        ({"max_tokens": 3}, "abc", "max_tokens", None),
        ({"stop_sequences": ["x", "ef"]}, "abcd", "stop_sequence", "ef"),
        ({"max_tokens": 1_000_000}, "abcdefg", "end_turn", None),
    ):
        whole = answer(own, ask("abcdefg", **fields))
        assert whole["content"][0]["text"] == text
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        assert events(own, ask("abcdefg", **fields))[-2]["delta"]["stop_reason"] == reason
    cut = answer(own, ask('<tool_call>\n{"name": "add", "arguments": {"n": 1}}', tools=TOOLS, max_tokens=45))
    assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})
    body = ask(TWO_CALLS, tools=TOOLS, max_tokens=TWO_CALLS.index('add"'))
    assert [block["text"] for block in answer(own, body)["content"]] == ["I call."]
    told = [event["delta"] for event in events(own, body) if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in told) == "I call."
    assert answer(own, ask(""))["content"] == []


def test_a_limit_inside_the_thinking_leaves_a_block_of_it(own: httpx.Client) -> None:
    body = ask(THOUGHT, max_tokens=THOUGHT.index("see"))
    whole = answer(own, body)
    assert whole["content"] == [{"type": "thinking", "thinking": "Let me", "signature": ""}]
    assert whole["stop_reason"] == events(own, body)[-2]["delta"]["stop_reason"] == "max_tokens"
    assert 0 < whole["usage"]["output_tokens_details"]["thinking_tokens"] < whole["usage"]["output_tokens"]


def sent_prompt(own: httpx.Client, thinker: Service, body: dict[str, Any]) -> str:
    answer(own, {"max_tokens": 4, **body})
    ids = memoryview(thinker.engine.submits[-1].prompt_ids).cast("i")
    return "".join(chr(i) if i < 256 else "|" for i in ids)


def test_turns_become_a_chat(own: httpx.Client, thinker: Service) -> None:
    turns = [
        {"role": "user", "content": "go"},
        {"role": "user", "content": [{"type": "text", "text": "on"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I call."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"n": 1}},
                {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "late"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    body = {"system": "Be kind.", "messages": turns}
    assert sent_prompt(own, thinker, body) == (
        '|system\nBe kind.|\n|user\ngo\non|\n|assistant\nI call.{"n": 1}{}|\n'
        "|tool\n2|\n|tool\nError: late|\n|user\nWell?|\n|assistant\n"
    )
    assert sent_prompt(own, thinker, {**body, "thinking": {"type": "disabled"}}).endswith("|assistant\nN")
    prefilled = {"messages": [*turns[:1], {"role": "assistant", "content": "It is"}]}
    assert sent_prompt(own, thinker, prefilled).endswith("|assistant\nIt is")


def test_tokens_are_counted_without_an_answer(own: httpx.Client, thinker: Service) -> None:
    body = ask("abc", tools=TOOLS, system="Be kind.")
    used = answer(own, body)["usage"]
    before = len(thinker.engine.submits)
    counted = own.post(f"{MESSAGES}/count_tokens", json=body).json()
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    assert len(thinker.engine.submits) == before


def test_formats_budgets_and_choices_reach_the_engine(own: httpx.Client, thinker: Service) -> None:
    def grammar(**fields: Any) -> str:
        answer(own, ask("x", tools=TOOLS, **fields))
        return json.dumps(json.loads(str(thinker.engine.submits[-1].sampling.grammar or "null")))

    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"x": {"const": 7}}}}
    assert '"const": 7' in grammar(output_config={"format": form, "effort": "low"})
    assert '"max_tokens": 9' in grammar(thinking={"type": "enabled", "budget_tokens": 9})
    several = grammar(tool_choice={"type": "any"})
    assert "add" in several and "now" in several and '"repeat"' in several
    assert '"repeat"' not in grammar(tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert "add" not in grammar(tool_choice={"type": "tool", "name": "now"})
    assert grammar(tool_choice={"type": "none"}) == "null"


def test_what_is_not_supported_is_refused_by_name(own: httpx.Client) -> None:
    def block(**fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [fields]}]}

    wrong: list[tuple[dict[str, Any], str]] = [
        (block(type="image", source={}), "messages[0].content[0].type: 'image'"),
        (block(type="tool_use", id="t", name="n", input={}), "messages[0].content[0].type: 'tool_use'"),
        (block(type="tool_result", content="x"), "tool_use_id"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: built-in tool 'bash_20250124'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "'no'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"temperature": 9}, "temperature"),
        (ask("x" * 600), "context length"),
    ]
    for fields, naming in wrong:
        for stream in (False, True):
            response = own.post(MESSAGES, json={**ask("x"), "stream": stream, **fields})
            assert response.status_code == 400, (fields, response.text)
            error = response.json()
            assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
            assert naming in error["error"]["message"], error


def test_failures_have_the_form_that_these_clients_read(own: httpx.Client, thinker: Service) -> None:
    failed = events(own, ask("Hello{fail}"))[-1]
    assert failed["type"] == "error" and failed["error"]["type"] == "api_error"
    full = own.post(MESSAGES, json=ask("{reject}", stream=True))
    assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error"
    assert "retry-after" in full.headers
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        refused = httpx.post(thinker.url + path, json=ask("x"), headers={"x-api-key": "no"})
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert own.get(MESSAGES).json()["type"] == "error"
    bearer = httpx.post(thinker.url + MESSAGES, json=ask("x", odd=1), headers={"authorization": f"Bearer {KEY}"})
    assert bearer.status_code == 200 and bearer.headers["x-radixserve-ignored-fields"] == "odd"


def test_a_client_that_leaves_ends_its_message(thinker: Service) -> None:
    for stream in (False, True):
        body = ask("a", system="{slow}", ignore_eos=True, stream=stream, request_id=f"left-{stream}")
        leaver = connect(thinker)
        leaver.sendall(request_bytes(MESSAGES, body).replace(b"\r\n\r\n", f"\r\nx-api-key: {KEY}\r\n\r\n".encode(), 1))
        thinker.wait_until(lambda: bool(thinker.engine.running))
        vanish(leaver, "FIN")
        thinker.wait_until(lambda: not thinker.engine.running and thinker.frontend.num_active == 0)
    assert {"left-False", "left-True"} <= set(thinker.engine.aborted)


def test_quiet_streams_get_pings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixserve.server.generation.QUIET_S", 0.05)
    monkeypatch.setattr("radixserve.server.routes.generate.FIRST_WORD_S", 0.05)
    with running_service(folder) as service:
        body = ask("{silent}", stream=True)
        with httpx.stream("POST", f"{service.url}{MESSAGES}", json=body, timeout=10) as stream:
            lines = [line for _, line in zip(range(4), stream.iter_lines(), strict=False)]
    assert lines == ["event: ping", 'data: {"type":"ping"}', "", "event: ping"]


def test_anthropic_client_streams_counts_and_raises(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": "tiny", **ask(THOUGHT + TWO_CALLS, tools=TOOLS)}
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Yes.I call." and final.stop_reason == "tool_use"
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"n": 1}, {}]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "1"}
        for block in final.content
        if block.type == "tool_use"
    ]
    turns: Any = [
        {"role": "user", "content": "<<ok>>"},
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": results},
    ]
    said = client.messages.create(model="tiny", max_tokens=9, messages=turns)
    assert said.content[0].type == "text" and said.content[0].text == "ok"
    assert client.messages.count_tokens(model="tiny", messages=turns).input_tokens == said.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        client.messages.create(**{**fields, "model": "no-such-model"})
    with pytest.raises(anthropic.BadRequestError, match="not supported"):
        client.messages.create(**{**fields, "tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    with (
        pytest.raises(anthropic.APIStatusError, match="finite"),
        client.messages.stream(**fields | ask("a{fail}")) as bad,
    ):
        bad.get_final_message()
