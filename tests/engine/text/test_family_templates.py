"""Templates of the families, with tool turns, are rendered as transformers renders them."""

from typing import Any

import pytest
from jinja2 import TemplateError

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.text.chat_template import ChatTemplate
from radixserve.engine.text.conversation import normalize_messages

from .family_templates import FAMILIES, PHI

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"name": "get_weather", "arguments": '{"city": "Tromsø", "days": [1, 2], "exact": true, "unit": null}'}
USER = {"role": "user", "content": "What's the <b>weather</b> in Tromsø & 'Bodø'?"}
ASKED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "abcdef123", "type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": '{"celsius": -3}'}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [{"role": "system", "content": " Be terse. /no_think"}, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}],
    "turns": [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n Cold. "},
        {"role": "user", "content": "OK"},
    ],
    "call": [USER, ASKED],
    "result": [USER, ASKED, RESULT],
    "answer": [USER, ASKED, RESULT, {"role": "assistant", "content": "-3 °C"}, {"role": "user", "content": "Thanks!"}],
    "results": [USER, ASKED, RESULT, {**RESULT, "content": "second"}],
    "two calls": [USER, {**ASKED, "content": "Let me see.", "tool_calls": ASKED["tool_calls"] * 2}],
    "out of turn": [USER, USER],
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "a < b & 'c' ø"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f'{name}\n"now"', "parameters": PARAMETERS}}
    for name in ("get_weather", "get_time")
]


def transformers_rendering(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **options)
    return str(rendered[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_conversations_with_tools_equal_transformers(family: str, conversation: str) -> None:
    template = ChatTemplate(FAMILIES[family], SPECIAL, origin=family)
    messages = normalize_messages(CONVERSATIONS[conversation])
    for tools in (None, TOOLS):
        for prompt in (True, False):
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
            try:
                expected = transformers_rendering(FAMILIES[family], messages, **options)
            except TemplateError as error:
                with pytest.raises(InvalidRequest) as caught:
                    template.render(messages, **options)
                assert str(error) in str(caught.value)
            else:
                assert template.render(messages, **options) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_most_conversations_are_rendered_and_the_tool_s_words_are_in_them(family: str) -> None:
    """So that the comparison above does not only compare complaints."""
    template = ChatTemplate(FAMILIES[family], SPECIAL, origin=family)
    turns = template.render(normalize_messages(CONVERSATIONS["turns"]))
    assert "Cold." in turns and "OK" in turns
    if family in ("llama3", "mistral", "qwen2", "qwen", "smollm3"):
        answer = template.render(normalize_messages(CONVERSATIONS["answer"]), tools=TOOLS)
        assert all(words in answer for words in ("Tromsø", "celsius", "get_time", "Thanks!"))


def test_own_keys_of_messages_reach_the_template() -> None:
    messages = [{"role": "system", "content": "x", "tools": "[1]"}, USER]
    text = ChatTemplate(PHI, SPECIAL, origin="phi").render(normalize_messages(messages))
    assert "<|tool|>[1]<|/tool|>" in text
    assert text == transformers_rendering(PHI, messages, add_generation_prompt=True)


def test_switches_of_a_request_reach_the_template() -> None:
    options = {"enable_thinking": False, "date_string": "2042", "tools_in_user_message": False}
    for family in ("smollm3", "llama3"):
        template = ChatTemplate(FAMILIES[family], SPECIAL, origin=family)
        ours = template.render([USER], tools=TOOLS, chat_template_kwargs=options)
        theirs = transformers_rendering(FAMILIES[family], [USER], tools=TOOLS, add_generation_prompt=True, **options)
        assert ours == theirs != template.render([USER], tools=TOOLS)
