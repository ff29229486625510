"""Chat templates written for these tests; together they use what templates on the Hub use."""

CHATML_WITH_DEFAULT_SYSTEM = """{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

# Namespaces, tools as JSON, tool calls, backward search for the last question, thinking switch (the style of Qwen 3).
NAMESPACE_AND_TOOLS = """{%- if tools %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
    {%- if loop.index0 > ns.last %}{{- '*' }}{%- endif %}
    {{- message.role ~ ': ' ~ content }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '<call>' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson(indent=2)) ~ '</call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Loop controls, macros, dates, trimming, alternation check, special tokens (the style of Llama and Mistral).
STRICT_WITH_MACRO = """{{ bos_token }}
{%- macro turn(role, text) -%}
[{{ role | upper }}] {{ text | trim }}{{ eos_token }}
{% endmacro -%}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set system = 'Year ' ~ strftime_now('%Y') %}{% set rest = messages %}{% endif %}
{{- turn('system', system) }}
{%- for message in rest %}
    {%- if message['role'] == 'tool' %}{% continue %}{% endif %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- generation %}
    {{- turn(message['role'], message['content']) }}
    {%- endgeneration %}
    {%- if loop.index > 20 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[ASSISTANT]' }}{% endif %}"""

PLAIN = (
    "{% for m in messages %}\n  <{{ m.role }}>{{ m.content }}\n{% endfor %}\n{% if add_generation_prompt %}>{% endif %}"
)

ALL = [CHATML_WITH_DEFAULT_SYSTEM, NAMESPACE_AND_TOOLS, STRICT_WITH_MACRO, PLAIN]
