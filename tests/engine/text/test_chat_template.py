import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from radixserve.engine.errors import InvalidRequest, ModelError
from radixserve.engine.text import chat_template, sandbox
from radixserve.engine.text.chat_template import (
    ChatTemplate,
    template_from_config,
    template_from_file,
    template_from_gguf,
)
from radixserve.engine.text.text_model import TextModel

from . import templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " Be terse. "}, {"role": "user", "content": "  two  \n"}],
    [
        {"role": "user", "content": "What's <b>5</b> & 'six'? čř🙂"},
        {"role": "assistant", "content": "<think>hm</think>\n\nEleven."},
        {"role": "user", "content": "</tool> thanks"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get", "arguments": {"city": "Tromsø", "n": [1, None, True]}}}],
        },
    ],
]
TOOLS = [{"type": "function", "function": {"name": "get", "description": "a < b & 'c' ø", "parameters": {}}}]


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL, origin="test")


def transformers_rendering(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **options)
    return str(rendered[0])


@pytest.mark.parametrize("source", templates.ALL)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(source: str, messages: list[dict[str, Any]], prompt: bool):
    for tools in (None, TOOLS):
        ours = compiled(source).render(messages, add_generation_prompt=prompt, tools=tools)
        assert ours == transformers_rendering(source, messages, add_generation_prompt=prompt, tools=tools)


@pytest.mark.parametrize("source", templates.ALL)
@pytest.mark.parametrize("ending", ["I think", "I think ", " I\n"])
def test_an_open_final_message_equals_transformers(source: str, ending: str):
    messages = [*CONVERSATIONS[0], {"role": "assistant", "content": ending}]
    ours = compiled(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == transformers_rendering(source, messages, continue_final_message=True)


def test_the_default_model_s_template_equals_transformers(text_model: TextModel, oracle: Any):
    for messages in CONVERSATIONS[:3]:
        assert text_model.render_chat(messages) == oracle.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


def test_template_variables_are_passed_on():
    source = templates.NAMESPACE_AND_TOOLS
    off = compiled(source).render(CONVERSATIONS[0], chat_template_kwargs={"enable_thinking": False})
    assert off.endswith("</think>\n\n") and "think" not in compiled(source).render(CONVERSATIONS[0])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_variables_cannot_replace_what_the_request_says(name: str):
    with pytest.raises(InvalidRequest, match=name):
        compiled(templates.PLAIN).render(CONVERSATIONS[0], chat_template_kwargs={name: 1})


def test_a_template_s_own_complaint_is_the_request_s_error():
    messages = [{"role": "assistant", "content": "x"}]
    with pytest.raises(InvalidRequest, match=r"^Roles must alternate user/assistant$"):
        compiled(templates.STRICT_WITH_MACRO).render(messages)


@pytest.mark.parametrize(
    "body", ["{{ nothing.at.all }}", "{{ 1 / 0 }}", "{{ messages[99].content + 'x' }}", "{{ 5 | tojson(nonsense=1) }}"]
)
def test_a_template_that_fails_is_the_request_s_error(body: str):
    with pytest.raises(InvalidRequest, match="chat template"):
        compiled(body).render(CONVERSATIONS[0])


def test_a_broken_template_names_itself_and_the_line():
    with pytest.raises(ModelError, match=r"chat template of here, line 2"):
        ChatTemplate("a\n{% if %}", {}, origin="here")


@pytest.mark.parametrize(
    "body",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.__init__.__globals__['os'] }}",
        "{% for a in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ 999999999 * 'x' }}",
        "{{ [1] * 999999999 }}",
    ],
)
def test_a_hostile_template_gets_nowhere(body: str):
    with pytest.raises(InvalidRequest):
        compiled(body).render(CONVERSATIONS[0])


def test_endless_output_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="too long"):
        compiled("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}").render(
            CONVERSATIONS[0]
        )


def test_an_open_message_and_a_generation_prompt_exclude_each_other():
    with pytest.raises(InvalidRequest, match="exclude"):
        compiled(templates.PLAIN).render(CONVERSATIONS[0], add_generation_prompt=True, continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it():
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        compiled("nothing").render(CONVERSATIONS[0], add_generation_prompt=False, continue_final_message=True)


def test_named_templates_choose_by_tools():
    config = {"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}
    for template in (
        template_from_config(config, {}, origin="x"),
        template_from_gguf(
            {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}, {}, origin="x"
        ),
    ):
        assert template is not None
        assert template.render(CONVERSATIONS[0]) == "plain"
        assert template.render(CONVERSATIONS[0], tools=TOOLS) == "tools"


def test_a_config_without_template_has_none():
    assert template_from_config({}, {}, origin="x") is None
    assert template_from_gguf({}, {}, origin="x") is None


def test_template_files_are_jinja_or_json(tmp_path: Path):
    (tmp_path / "t.jinja").write_text("{{ bos_token }}!")
    (tmp_path / "t.json").write_text(json.dumps({"chat_template": "{{ bos_token }}!"}))
    (tmp_path / "empty.json").write_text("{}")
    for name in ("t.jinja", "t.json"):
        assert template_from_file(tmp_path / name, SPECIAL).render(CONVERSATIONS[0]) == "<s>!"
    with pytest.raises(ModelError, match="empty.json"):
        template_from_file(tmp_path / "empty.json", SPECIAL)
    with pytest.raises(ModelError, match=re.escape("absent.jinja")):
        template_from_file(tmp_path / "absent.jinja", SPECIAL)


def peak_kib() -> int:
    """Of this process's memory, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for m in [[1]] recursive %}{{ loop([m, m]) }}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(90) %}{% set ns.x = ns.x.replace('b', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(90) %}{% set ns.x = ns.x|replace('b', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=['ab']) %}{% for a in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ 'x' * 999999999 }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x'|center(999999999) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d'|format(1) }}",
    "{{ [1]|batch(999999999, 'x')|list }}",
    "{{ '{:999999d}{:9999999999d}'.format(1, 1) }}",
    "{{ '{0:{1}}'.format(1, 9999999999) }}",
    "{{ '{a[0]:{a[1]}}'.format(a=[1, 9999999999]) }}",
    "{{ ('{0}' * 999999).format('x' * 999999) }}",
    "{{ ('%(a)s' * 999999) % {'a': 'x' * 999999} }}",
    "{{ ('%(a)s' * 999999)|format(a='x' * 999999) }}",
    "{{ ('\t' * 999999).expandtabs(999999) }}",
    "{{ ('a' * 999999).translate({97: 'x' * 999999}) }}",
    "{{ range(99999)|join('x' * 999999) }}",
    "{{ ''.join(range(99999)|map('center', 999999)) }}",
    "{{ range(99999)|map('center', 999999)|sort }}",
    "{{ ('x\n' * 999999)|indent(999999) }}",
    "{{ ([1]|batch(999999, ['x' * 999999])|first)|string }}",
    "{{ messages|tojson(indent=999999999) }}",
    "{% set ns = namespace(x=99) %}{% for a in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    *(
        f"{{% set ns = namespace(x=['ab']) %}}{{% for a in range(90) %}}{{% set ns.x = {more} %}}{{% endfor %}}{write}"
        for more, write in [
            ("[ns.x, ns.x]", "{{ ns.x }}"),
            ("[ns.x, ns.x]", "{{ ns.x|tojson }}"),
            ("[ns.x, ns.x]", "{{ ns.x|upper }}"),
            ("[ns.x, ns.x]", "{{ 'x' ~ ns.x }}"),
            ("[ns.x, ns.x]", "{{ '%s' % (ns.x,) }}"),
            ("{'a': ns.x, 'b': ns.x}", "{{ ns }}"),
            ("namespace(a=ns.x, b=ns.x)", "{{ ns.x }}"),
        ]
    ),
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_would_never_end_or_fill_the_memory_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_RENDER_S", 0.2)
    before_s, before_kib = time.process_time(), peak_kib()
    with pytest.raises(InvalidRequest):
        compiled(source).render(CONVERSATIONS[0])
    assert time.process_time() - before_s < 5
    assert peak_kib() - before_kib < 500 << 10


def test_limits_leave_honest_templates_alone() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
        "{{ 'a' ~ 1 ~ none }}{{ '%s-%d' % ('x', 3) }}{{ '%s'|format('y') }}{{ 'x'|center(3) }}"
        "{{ 'aXa'|replace('X', '-') }}{{ '{}: {:>3}'.format('k', 1) }}{{ ','.join(['a', 'b']) }}"
        "{{ {'n': 1700000000}|tojson }}{{ 'a b'.replace(' ', '_').ljust(5) }}|{{ [1, 2, 3]|batch(2)|list }}"
        "{% for k, v in {'p': 1}.items() %}{{ k }}={{ v }}{% endfor %}{% for x in nothing %}{% else %}none{% endfor %}"
    )
    text = compiled(source).render([{"role": "user", "content": "a"}] * 3)
    assert text == '1/3,2/3,3/3a1Nonex-3y x a-ak:   1a,b{"n": 1700000000}a_b  |[[1, 2], [3]]p=1none'
