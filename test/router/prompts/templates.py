"""Chat templates in the manner of model families: what they read, loop over, refuse and trim."""

from typing import Final

# Parts or text, tools as JSON, reasoning of former turns dropped, results of tools grouped, thinking switched off.
THINKER: Final = """\
{%- macro shown(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' or 'image' in part -%}<|image|>
            {%- elif 'text' in part -%}{{ part.text }}
            {%- else -%}{{ part | tojson }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if not messages %}{{ raise_exception('no messages') }}{% endif -%}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ shown(messages[0].content) }}

{% endif %}# Tools

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ shown(messages[0].content) }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=messages | length - 1, searching=true) -%}
{%- for message in messages[::-1] -%}
    {%- set index = (messages | length - 1) - loop.index0 -%}
    {%- if ns.searching and message.role == 'user' -%}
        {%- set ns.searching = false -%}
        {%- set ns.last = index -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set content = shown(message.content) -%}
    {%- if message.role in ('user', 'developer', 'latest_reminder') or (message.role == 'system' and not loop.first) -%}
<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% elif message.role == 'assistant' -%}
        {%- set thought = '' -%}
        {%- if message.reasoning_content is string -%}{%- set thought = message.reasoning_content -%}
        {%- elif '</think>' in content -%}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
<|im_start|>assistant
{% if loop.index0 > ns.last and thought %}<think>
{{ thought | trim }}
</think>

{% endif %}{{ content }}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
{{ '\\n' if not loop.first or content }}<tool_call>
{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}
</tool_call>
        {%- endfor -%}
<|im_end|>
{% elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ content }}
</tool_response>
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{%- endif -%}
"""

# Its own beginning of text, headers, JSON with indents, content as text, `generation` blocks.
HEADERS: Final = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('on a day') %}{% endif %}
{%- set first = messages[0] %}
{%- if first['role'] == 'system' %}{% set system = first['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
<|header|>system<|/header|>

Today: {{ date_string }} {{ reasoning_effort }}
{% if tools is not none %}
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}
{% endif %}
{{ system }}<|eot|>
{%- for message in messages %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
<|header|>assistant<|/header|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>
    {%- elif message.role in ('tool', 'function') %}
<|header|>ipython<|/header|>

{{ message.content | tojson if message.content is mapping or message.content is iterable else message.content }}<|eot|>
    {%- else %}
<|header|>{{ message['role'] }}<|/header|>

{% generation %}{{ message['content'] | trim }}{% endgeneration %}<|eot|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|header|>assistant<|/header|>

{% endif %}
"""

# Fields as XML, history of thinking truncated, whole messages and tools shown, so that key order and nulls count.
MARKUP: Final = """\
{%- set truncate = truncate_history_thinking if truncate_history_thinking is defined else true -%}
{{- '<SPECIAL_10>System\\n' -}}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% set loop_messages = messages[1:] -%}
{%- else %}{% set loop_messages = messages %}{% endif -%}
{%- if tools %}{{ '\\n<functions>' -}}
    {%- for tool in tools -%}
        {%- set tool = tool.function if tool.function is defined else tool -%}
        {%- for key, value in tool.items() %}{{ '\\n<' ~ key ~ '>' }}{{ value | tojson }}{{ '</' ~ key ~ '>' -}}
        {%- endfor -%}
    {%- endfor -%}{{ '\\n</functions>' -}}
{%- endif -%}
{%- for message in loop_messages -%}
    {{- '\\n<SPECIAL_11>' ~ message.role ~ '\\n' -}}
    {%- if truncate and message.role == 'assistant' and not loop.last -%}
        {{- message.content.split('</think>') | last -}}
    {%- else -%}{{- message.content -}}{%- endif -%}
    {{- message | tojson -}}
{%- endfor -%}
{{- '\\n<SPECIAL_11>assistant\\n' -}}
{{- '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>\\n' -}}
"""

# Bare functions, strict turns.
BRACKETS: Final = """\
{{- bos_token }}
{%- for tool in tools or [] %}
    {%- if 'function' in tool %}{{ raise_exception('bare functions only') }}{% endif %}
{%- endfor %}
{%- if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}
    {%- if message.role == 'user' %}[INST] {{ message.content }} [/INST]
    {%- else %} {{ message.content }}{{ eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Turns of two, no system message, an answer by another name.
TURNS: Final = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}
{%- for message in messages -%}
    {%- set is_users = message['role'] == 'user' -%}
    {%- if is_users != (loop.index0 % 2 == 0) -%}{{ raise_exception('turns must alternate') }}{%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""
