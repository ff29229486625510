"""The clients of other APIs for chats, against the real server: an agent each, that calls two tools and ends."""

from typing import Any

import anthropic
import openai

from radixserve.tests.contract.api import Api

RESULTS = {"find_city": "Oslo is in Norway.", "add": "3"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "find_city": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    "add": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
}
QUESTION = "Tell me about the weather in Oslo."


def test_an_agent_on_responses_calls_two_tools_and_ends(api: Api) -> None:
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    left = dict(SCHEMAS)
    fields: Any = {"model": "smollm2-135m-instruct", "temperature": 0, "max_output_tokens": 40}
    with openai.OpenAI(base_url=f"{api.server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        while left:
            tools: list[Any] = [{"type": "function", "name": name, "parameters": left[name]} for name in left]
            required: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
            with client.responses.stream(input=history, **required, **fields) as stream:
                output = stream.get_final_response().output
            (call,) = (item for item in output if item.type == "function_call")
            del left[call.name]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]}
            history += [*output, result]
        fields["max_output_tokens"] = 8
        said = client.responses.create(input=history, **fields)
        history += [*said.output, {"role": "user", "content": "Go on."}]
        last = client.responses.create(input=history, **fields)
    assert said.output_text and said.usage is not None and last.usage is not None
    assert last.usage.input_tokens_details.cached_tokens >= said.usage.input_tokens // 2  # in whole pages


def test_an_agent_on_messages_calls_two_tools_and_ends(api: Api) -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    left = dict(SCHEMAS)
    fields: Any = {"model": "smollm2-135m-instruct", "max_tokens": 40}
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=api.server.url, api_key="none", max_retries=0, timeout=60) as client:
        while left:
            tools: list[Any] = [{"name": name, "input_schema": left[name]} for name in left]
            with client.messages.stream(messages=turns, tools=tools, tool_choice=one, **fields) as stream:
                answer = stream.get_final_message()
            assert answer.stop_reason == "tool_use"
            (call,) = (block for block in answer.content if block.type == "tool_use")
            assert call.input.keys() == left.pop(call.name)["properties"].keys()
            result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[call.name]}
            turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        fields["max_tokens"] = 8
        said = client.messages.create(messages=turns, **fields)
        turns += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "Go on."}]
        last = client.messages.create(messages=turns, **fields)
    assert said.content[0].type == "text" and said.content[0].text
    assert (last.usage.cache_read_input_tokens or 0) >= said.usage.input_tokens // 2  # in whole pages
