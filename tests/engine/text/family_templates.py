"""Chat templates with the means that those of the families use, tool turns included; written for these tests."""

# Llama 3: a date that may be given, tools inside of the first user message or the system's, tool results of any type.
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}
    {%- else %}{%- set date_string = "1999" %}{%- endif %}
{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nYear: " + date_string + "\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message + "<|eot|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("No first user message to put the tools into") }}{%- endif %}
    {{- '<|head|>user<|/head|>\\n\\n' -}}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This template takes one tool call at once") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|head|>ipython<|/head|>\\n\\n" }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}"""

# Mistral: filters with arguments, tools before the last user message, ids of calls that must have a length.
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages if not message.role in ("tool", "tool_results") and not message.get("tool_calls") %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) and message["role"] == "user" %}
        {{- raise_exception("Roles must take turns") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] }}
        {%- else %}{{- "[INST]" + message["content"] }}{%- endif %}
        {{- "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Ids of tool calls have 9 characters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message["role"] == "assistant" %}{{- message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- set content = message.content.content if message.content.content is defined else message.content %}
        {{- '[RESULTS]{"content": ' + content|string + ', "id": "' + message.tool_call_id|default("?", true) + '"}' }}
    {%- else %}{{- raise_exception("Unknown role " ~ message["role"]) }}{%- endif %}
{%- endfor %}"""

# Qwen 3: results of several tools in one user turn, and a look at the messages before and after.
QWEN = """{%- if tools %}
    {{- '<|s|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|e|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|s|>system\\n' + messages[0].content + '<|e|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|s|>' + message.role + '\\n' + message.content + '<|e|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}{%- set content = message.content %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|s|>assistant\\n' }}
        {%- if loop.last or reasoning %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<call>{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}</call>' }}
        {%- endfor %}
        {{- '<|e|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|s|>user' }}{%- endif %}
        {{- '\\n<result>\\n' }}{{- message.content }}{{- '\\n</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|e|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|s|>assistant\\n' }}{%- endif %}"""

# Gemma: the system message goes into the first user turn, roles are renamed, content may be parts; lines are trimmed.
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<turn>model\\n'}}
{%- endif -%}
"""

# Phi: line breaks of the template itself are part of the text, and tools may be in a message.
PHI = """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}{% endif %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}
"""

# SmolLM3: macros with defaults, marks of what the model has written, switches in the system message, loop controls.
SMOLLM_3 = """{%- macro system_turn(text, mode='/think') -%}
<|s|>system
## Metadata

Year: {{ strftime_now("%Y") }}
Mode: {{ mode }}

{{ text.rstrip() if text else 'Be helpful.' }}
{% endmacro -%}
{%- set system = messages[0].content if messages[0].role == "system" else "" -%}
{%- set quick = "/no_think" in system or enable_thinking is defined and not enable_thinking -%}
{%- set mode = "/no_think" if quick else "/think" -%}
{{- system_turn(system.replace("/no_think", ""), mode=mode) -}}
{%- if xml_tools or tools -%}
    {%- set ns = namespace(xml="") -%}
    {%- for tool in tools -%}
        {%- set ns.xml = ns.xml ~ (tool | tojson) ~ "\\n" -%}
    {%- endfor -%}
    {{- "<tools>\\n" + ns.xml + "</tools>" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == "system" -%}{%- continue -%}{%- endif -%}
    {%- if loop.index > 40 -%}{%- break -%}{%- endif -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "assistant" -%}
        {%- generation -%}
        {{- "<|s|>" + message.role + "\\n" + ("<think>\\n\\n</think>\\n" if mode == "/no_think" else "") -}}
        {{- content.lstrip("\\n") -}}
        {%- for call in message.tool_calls | default([]) -%}
            {{- "<code>" ~ call.function.name ~ "(" -}}
            {%- for name, value in call.function.arguments | dictsort -%}
                {{- name ~ "=" ~ (value | tojson) ~ (", " if not loop.last else "") -}}
            {%- endfor -%}{{- ")</code>" -}}
        {%- endfor -%}
        {{- "<|e|>\\n" -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- "<|s|>" + ("user" if message.role == "tool" else message.role) + "\\n" + content + "<|e|>\\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|s|>assistant\\n" -}}{%- if mode == "/no_think" -%}{{- "<think>\\n\\n</think>\\n" -}}{%- endif -%}
{%- endif -%}"""

# Llama 2, and Mixtral: the system message inside of the first user turn, which begins anew for each answer.
LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Take turns') }}{% endif %}
    {%- set content = message['content'] %}
    {%- if loop.index0 == 0 and system_message != false %}
        {%- set content = '<<S>>\\n' + system_message + '\\n<</S>>\\n\\n' + message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'system' %}{{ '<<S>>' + content.strip() + '<</S>>' }}
    {%- elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""

# SmolLM2: ChatML with a system message where there is none.
SMOLLM_2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|s|>system\nBe a helpful model<|e|>\n' }}{% endif %}"
    "{{'<|s|>' + message['role'] + '\n' + message['content'] + '<|e|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|s|>assistant\n' }}{% endif %}"
)

# Qwen 2.5: the same, with tools behind the system message and calls behind what the assistant says.
QWEN_2 = """{%- if messages[0]['role'] == 'system' %}{%- set first = messages[0]['content'] %}
{%- else %}{%- set first = 'Be helpful.' %}{%- endif %}
{{- '<|s|>system\\n' + first }}
{%- if tools %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools>" }}
{%- endif %}
{{- '<|e|>\\n' }}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|s|>' + message.role + '\\n' + message.content + '<|e|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|s|>' + message.role }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</call>' }}
        {%- endfor %}
        {{- '<|e|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|s|>user' }}{%- endif %}
        {{- '\\n<result>\\n' }}{{- message.content }}{{- '\\n</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|e|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|s|>assistant\\n' }}{%- endif %}"""

# Phi-4: all in one line, so that no line break is added; other roles than three are left out.
PHI_4 = (
    "{% for message in messages %}{% if (message['role'] == 'system') %}"
    "{{'<|s|>system<|sep|>' + message['content'] + '<|e|>'}}{% elif (message['role'] == 'user') %}"
    "{{'<|s|>user<|sep|>' + message['content'] + '<|e|>'}}{% elif (message['role'] == 'assistant') %}"
    "{{'<|s|>assistant<|sep|>' + message['content'] + '<|e|>'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|s|>assistant<|sep|>' }}{% endif %}"
)

FAMILIES = {
    "llama2": LLAMA_2,
    "llama3": LLAMA_3,
    "mistral": MISTRAL,
    "qwen2": QWEN_2,
    "qwen": QWEN,
    "gemma": GEMMA,
    "phi": PHI,
    "phi4": PHI_4,
    "smollm2": SMOLLM_2,
    "smollm3": SMOLLM_3,
}
