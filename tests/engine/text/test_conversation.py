from typing import Any

import pytest

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.text.conversation import normalize_messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "messages",
    [
        None, [], {}, "hi", [{}], [None], [{"role": "user"}], [{"content": "x"}], user(None), user(5), user({"a": 1}),
        [{"role": "wizard", "content": "x"}], [{"role": 5, "content": "x"}], [{"role": ["user"], "content": "x"}],
        user([{"type": "text"}]), user([{"type": "text", "text": 5}]), user([None]), user([5]), user([{"text": "x"}]),
        [{"role": "assistant"}], [{"role": "assistant", "content": None}], [{"role": "system", "content": None}],
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: Any):
    with pytest.raises(InvalidRequest) as caught:
        normalize_messages(messages)
    assert caught.value.param and caught.value.param.startswith("messages") and caught.value.status == 400
    assert str(caught.value).startswith(f"{caught.value.param}: ")


def test_images_are_refused_by_name():
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[1\].*image_url"):
        normalize_messages(user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}]))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("plain", "plain"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        (["one", "two"], "one\ntwo"),
    ],
)
def test_text_parts_are_joined_by_line_breaks(content: object, expected: str):
    assert normalize_messages(user(content)) == user(expected)


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_missing_content_beside_tool_calls_is_empty_text(content: dict[str, Any]):
    [message] = normalize_messages([{"role": "assistant", **content, "tool_calls": [CALL]}])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Oslo"}}


def test_an_empty_tool_call_list_leaves_the_message():
    message = {"role": "assistant", "content": "real", "tool_calls": []}
    assert normalize_messages([message]) == [{"role": "assistant", "content": "real"}]


@pytest.mark.parametrize("arguments", ["{", "[1]", 5, '"text"', "[" * 100_000])
def test_bad_tool_call_arguments_are_refused(arguments: object):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match="arguments"):
        normalize_messages([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_a_tool_call_without_arguments_has_none(arguments: object):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    [message] = normalize_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("calls", ["x", {"a": 1}, [None], [{}], [{"function": {}}], [{"function": {"name": 5}}]])
def test_malformed_tool_calls_are_refused(calls: object):
    with pytest.raises(InvalidRequest, match="tool_calls"):
        normalize_messages([{"role": "assistant", "content": "x", "tool_calls": calls}])


def test_developer_is_the_system_role_and_other_fields_stay():
    messages = normalize_messages(
        [
            {"role": "developer", "content": "x"},
            {"role": "tool", "content": "5 C", "tool_call_id": "call_1", "name": None},
        ]
    )
    assert messages == [
        {"role": "system", "content": "x"},
        {"role": "tool", "content": "5 C", "tool_call_id": "call_1"},
    ]


def test_the_caller_s_messages_are_not_changed():
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    normalize_messages(messages)
    assert messages == [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert CALL["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}


def test_reasoning_of_earlier_answers_is_known_by_both_of_its_names():
    for fields in (
        {"reasoning": "Hm."},
        {"reasoning_content": "Hm."},
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
    ):
        (message,) = normalize_messages([{"role": "assistant", "content": None, **fields}])
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "")
