"""Structured output and tool calls with the default model, which is small: what is enforced holds even there."""

import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from radixserve.tests.contract.api import CHAT, COMPLETIONS, Api, chat_body, refused
from radixserve.tests.contract.schemas import random_schema
from radixserve.tests.e2e.server_process import RunningServer, running_server

QUESTION: list[Any] = [{"role": "user", "content": "Tell me about the weather in Oslo."}]


class Weather(BaseModel):
    city: str = Field(max_length=12)
    degrees: int = Field(ge=-40, le=40)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS: list[Any] = [tool("find_city", city={"enum": ["Oslo", "Rome"]}), tool("add", a={"enum": [1, 2]})]


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.server.url}/v1", api_key="none", max_retries=0, timeout=90) as own:
        yield own


@pytest.fixture(scope="module")
def model(api: Api) -> str:
    return str(api.http.get("/v1/models").json()["data"][0]["id"])


def check_schemas(server: RunningServer, count: int, max_tokens: int) -> int:
    """Ask for ``count`` random schemas, some at a time; returns how many answers came to their end."""

    def ask(seed: int) -> int:
        rng = random.Random(seed)
        schema = random_schema(rng)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = chat_body("Make up a record.", response_format=form, max_tokens=max_tokens, seed=seed, temperature=1.0)
        choice = patient.answer(CHAT, body)["choices"][0]
        if choice["finish_reason"] == "length":
            return 0
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        return 1

    patient = Api(server, timeout=900)
    with patient.http, ThreadPoolExecutor(16) as pool:
        return sum(pool.map(ask, range(count)))


def test_random_schemas_are_kept(api: Api) -> None:
    assert check_schemas(api.server, 10, max_tokens=60) >= 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_random_schemas_are_kept() -> None:
    with running_server() as server:  # with the model's own weights, as users have it
        num_ended = check_schemas(server, 200, max_tokens=160)
        assert "Traceback" not in server.log()
    print(f"200 random schemas: {num_ended} answers came to their end, and all of them fit")
    assert num_ended >= 120


def test_openai_parses_models_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "messages": QUESTION, "response_format": Weather, "temperature": 0}
    parsed = client.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with client.chat.completions.stream(**fields) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_choices_regexes_and_grammars_hold_with_everything_else(api: Api) -> None:
    whole = api.chat("Yes or no?", structured_outputs={"choice": ["yes", "no"]}, n=4, temperature=1.5, logprobs=True)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert set(texts) <= {"yes", "no"}
    assert all(choice["logprobs"]["content"] for choice in whole["choices"])
    free = api.chat("Yes or no?", max_tokens=3, temperature=0)["choices"][0]["message"]["content"]
    assert free not in ("yes", "no"), "the others of a batch are free"
    text = api.comp("A number:", guided_regex="[0-9]{4}-[0-9]{2}", max_tokens=20)["choices"][0]["text"]
    assert re.fullmatch(r"\d{4}-\d\d", text)
    cut = api.comp("A number:", regex="[0-9]{4}-[0-9]{2}", stop="-", max_tokens=20)["choices"][0]
    assert re.fullmatch(r"\d{4}", cut["text"]) and cut["stop_reason"] == "-"
    events = api.events(COMPLETIONS, {"prompt": "Go", "ebnf": 'root ::= "a"+ "b"', "max_tokens": 30, "min_tokens": 4})
    streamed = "".join(event["choices"][0]["text"] for event in events)
    assert re.fullmatch("a+b?", streamed)


CAPITALS = (
    "The capital of (France|Germany|Italy) is (Paris|Berlin|Rome), "
    "and the capital of (Spain|Portugal) is (Madrid|Lisbon)[.]"
)
DELIVERY: dict[str, Any] = {
    "preferred_delivery_address": {"enum": ["home", "office"]},
    "identification_number": {"enum": [1234, 5678]},
    "is_returning_customer": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("prompt", "form", "least_saved"),
    [
        ("Customer record as JSON:", {"json": tool("x", **DELIVERY)["function"]["parameters"]}, 15),
        ("The capital of France is", {"regex": CAPITALS}, 6),
    ],
)
def test_what_a_grammar_forces_is_said_in_fewer_steps(api: Api, prompt: str, form: Any, least_saved: int) -> None:
    texts, steps, forced = [], [], []
    for rules in ({"logprobs": 0}, {}):  # with logprobs each token has a step of its own
        before = api.server.stats()
        choice = api.comp(prompt, structured_outputs=form, max_tokens=120, **rules)["choices"][0]
        after = api.server.wait_idle()
        assert choice["finish_reason"] == "stop"
        texts.append(choice["text"])
        steps.append(after["steps"] - before["steps"])
        forced.append(after["forced_tokens"] - before["forced_tokens"])
    assert texts[0] == texts[1]
    assert steps[0] - steps[1] >= least_saved and forced[0] == 0 and forced[1] >= least_saved


def test_forced_text_goes_with_choices_streams_penalties_and_limits(api: Api) -> None:
    form = {"regex": "Without any doubt, the answer to the question is (yes|no), and not (yes|no)[.]"}
    fields = {"prompt": "Is it so?", "structured_outputs": form, "temperature": 1.0, "max_tokens": 60}
    many = api.comp(**fields, n=3, seed=1, frequency_penalty=0.5, repetition_penalty=1.2)
    assert all(re.fullmatch(form["regex"], choice["text"]) for choice in many["choices"])
    pieces, reason = api.streamed(COMPLETIONS, {**fields, "temperature": 0})
    assert reason == "stop" and re.fullmatch(form["regex"], "".join(pieces))
    for limit in (3, 7):
        cut = api.comp(**{**fields, "max_tokens": limit})
        assert cut["usage"]["completion_tokens"] == limit and cut["choices"][0]["finish_reason"] == "length"
    stopped = api.comp(**fields, stop="answer", return_token_ids=True)
    assert (
        stopped["choices"][0]["text"] == "Without any doubt, the " and stopped["choices"][0]["stop_reason"] == "answer"
    )
    assert stopped["usage"]["completion_tokens"] == len(stopped["choices"][0]["token_ids"]) < 20


def test_schemas_that_no_grammar_can_hold_are_refused_by_name(api: Api) -> None:
    for form, reason in (
        ({"regex": "a("}, "parenthesis"),
        ({"grammar": "root ::= x"}, "x"),
        ({"json": {"not": {}}}, "not"),
    ):
        error = refused(api.post(CHAT, chat_body("hi", structured_outputs=form)), naming=reason)
        assert error["param"].startswith("structured_outputs.")


def test_a_named_tool_is_called_in_a_stream(client: openai.OpenAI, model: str) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    fields: Any = {"model": model, "messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    with client.chat.completions.stream(**fields, tool_choice=named) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) in ({"a": 1}, {"a": 2})


def test_an_agent_calls_two_tools_and_ends(client: openai.OpenAI, model: str) -> None:
    results = {"find_city": "Oslo is in Norway.", "add": "3"}
    messages, called = list(QUESTION), []
    while True:
        left: list[Any] = [one for one in TOOLS if one["function"]["name"] not in called]
        choice = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=left or TOOLS,
            tool_choice="required" if left else "none",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=40,
        ).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if not choice.message.tool_calls:
            break
        assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
        for call in choice.message.tool_calls:
            assert call.type == "function"
            called.append(call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": results[call.function.name]})
    assert sorted(called) == ["add", "find_city"]
    assert choice.message.content


@pytest.mark.filterwarnings("ignore")  # of packages that come along
def test_langchain_gets_structure_and_tool_calls(langchain: Callable[..., Any]) -> None:
    chat = langchain(max_tokens=60)
    assert isinstance(chat.with_structured_output(Weather).invoke("Oslo?"), Weather)
    said = chat.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False).invoke("Oslo?")
    (call,) = said.tool_calls
    assert (call["name"], call["args"]) in [
        ("find_city", {"city": "Oslo"}), ("find_city", {"city": "Rome"}), ("add", {"a": 1}), ("add", {"a": 2})
    ]  # fmt: skip
    result = {"role": "tool", "content": "It is 7 degrees.", "tool_call_id": call["id"]}
    assert chat.invoke([{"role": "user", "content": "Oslo?"}, said, result]).content
