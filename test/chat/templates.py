"""Three templates as models have them, and a renderer for them: no tokenizer is needed."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import jinja2

_PARTS: Final = (
    "{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
# Tools as lines of JSON behind the system prompt; what an assistant thought before the last question is dropped.
_CHATML: Final = (
    _PARTS
    + """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' and not (m.content is string
        and m.content.startswith('<tool_response>')) %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ shown(messages[0].content) + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\nYou may call functions.\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools>\\nCall with JSON.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + shown(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- if effort %}{{ '<|im_start|>system\\nReasoning: ' + effort + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content, thought = shown(m.content or ''), m.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + shown(m.content) + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not loop.first or m.role != 'system' %}
        {{- '<|im_start|>' + m.role + '\\n' + shown(m.content) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}{{ '<|im_start|>assistant\\n' }}"""
)
# Trims, and has tools as indented JSON in the first question, whose end they precede.
_HEADERS: Final = (
    _PARTS
    + """\
{{- '<|begin|><|header|>system<|/header|>\\n\\nCutting knowledge date: December 2023\\n' }}
{%- if effort %}{{ 'Effort: ' + effort + '\\n' }}{% endif %}
{%- if messages[0].role == 'system' %}{{ '\\n' + shown(messages[0].content) | trim }}{% set messages = messages[1:] %}
{%- endif %}{{ '<|eot|>' }}
{%- for m in messages %}
    {{- '<|header|>' + ('ipython' if m.role == 'tool' else m.role) + '<|/header|>\\n\\n' }}
    {%- if loop.first and tools %}{{ 'Use these functions:\\n\\n' }}
        {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {%- endif %}
    {{- shown(m.content or '') | trim }}
    {%- for call in m.tool_calls or [] %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
    {%- endfor %}{{ '<|eot|>' }}
{%- endfor %}{{ '<|header|>assistant<|/header|>\\n\\n' }}"""
)
# Plain words for roles, tools as one JSON list before the last question, and calls as one, too.
_WORDS: Final = (
    _PARTS
    + """\
{{- '<s>' }}{% if effort %}{{ '[EFFORT]' + effort + '[/EFFORT]' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}{{ '[TOOLS] ' + tools | tojson + '[/TOOLS]' }}{% endif %}
        {{- 'User: ' + shown(m.content) + '\\n' }}
    {%- elif m.role == 'tool' %}{{ 'Result: ' + {'content': shown(m.content)} | tojson + '\\n' }}
    {%- elif m.tool_calls %}
        {{- shown(m.content or '') + '[CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '' if loop.last else ', ' }}
        {%- endfor %}{{ ']</s>\\n' }}
    {%- else %}{{ m.role | capitalize + ': ' + shown(m.content or '') | trim + '\\n' }}
    {%- endif %}
{%- endfor %}{{ 'Assistant:' }}"""
)
TEMPLATES: Final = {"chatml": _CHATML, "headers": _HEADERS, "words": _WORDS}


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=False)  # noqa: S701
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(template)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], effort: str | None
) -> str:
    """A prompt as SGLang renders it: a call's arguments are objects."""
    objects = [
        message
        if not message.get("tool_calls")
        else {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        for message in messages
    ]
    return _compiled(template).render(messages=objects, tools=tools, effort=effort)


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
