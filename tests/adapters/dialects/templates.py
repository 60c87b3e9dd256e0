"""Chat templates in the style of known families, and conversations to render."""
# ruff: noqa: E501 - in a template a line break may be output

from typing import Any

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Date, tools as indented JSON, an optional system message, a generation block.
DATED = """\
{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|header|>system<|end_header|>\\n\\nToday is " + date_string + ".\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system ~ eot_token ~ loop_outside }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {%- set fn = call.function %}
            {{- '<|header|>assistant<|end_header|>\\n\\n' -}}
            {{- '{"name": "' + fn.name + '", "parameters": ' }}{{- fn.arguments | tojson }}{{- "}" }}
        {%- endfor %}
    {%- elif message.role in ["tool", "ipython"] %}
        {{- "<|header|>ipython<|end_header|>\\n\\n" + (message.content | tojson if message.content is mapping else message.content) }}
    {%- else %}
        {{- '<|header|>' + message['role'] + '<|end_header|>\\n\\n' }}
        {%- generation %}{{ message['content'] | trim }}{% endgeneration %}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end_header|>\\n\\n' }}
{%- endif %}
"""

# Requires alternating roles, keeps state in a namespace, breaks out of loops.
STRICT = """\
{%- if messages[0].role == "system" %}{%- set system = messages[0].content %}{%- set history = messages[1:] %}
{%- else %}{%- set history = messages %}{%- endif %}
{%- set ns = namespace(index=0, last=-1) %}
{%- for message in history %}
  {%- if (message.role == "user") != (ns.index % 2 == 0) %}
    {{- raise_exception("After the optional system message, roles must alternate user/assistant/user/...") }}
  {%- endif %}
  {%- if message.role not in ["user", "assistant"] %}{% continue %}{% endif %}
  {%- set ns.index = ns.index + 1 %}
  {%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- macro wrapped(text, marks=('[INST]', '[/INST]')) %}{{ marks | join(' ' ~ text ~ ' ') }}{% endmacro %}
{%- for message in history %}
  {%- if message.role == "user" %}
    {%- if loop.index0 == ns.last and system is defined %}{{- wrapped(system + "\\n\\n" + message.content) }}
    {%- else %}{{- wrapped(message.content) }}{%- endif %}
  {%- else %}{{- " " + message.content.strip() + eos_token }}{%- endif %}
  {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}"""

# Reasoning is removed from earlier messages; methods, slices, filters, tests, loop variables.
THINKING = """\
{%- for message in messages[::-1] %}
  {%- set index = (messages|length - 1) - loop.index0 %}{{- '' if index else '' }}
{%- endfor %}
{%- for message in messages %}
  {%- set content = message.content if message.content is string else '' %}
  {%- set reasoning = '' %}
  {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
  {%- elif '</think>' in content %}
    {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
{{ '<|' ~ message.role ~ '|>' }}
{%- if loop.last or not loop.first %} ({{ loop.index }}/{{ loop.length }}){% endif %}
{{ reasoning|upper|replace('A', '[a]') }}{{ content|default('none', true)|indent(2) }}{{ loop.cycle(';', ',') }}
{% endfor -%}
{% set names = messages|map(attribute='role')|unique|sort|list %}{{ names|tojson }} {{ "%s has %d" % ("it", names|length) }}
{{ 'x' * 3 }} {{ 7 // 2 + 2 ** 3 }} {{ {'a': [1, 2.5, none, true]}|tojson(separators=(',', ':')) }} {{ dict(b='é<&>')|tojson }}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

ALL = {"chatml": CHATML, "dated": DATED, "strict": STRICT, "thinking": THINKING}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter für <Städte> & "Orte"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi 👋"}],
    "system": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "What is 2 < 3 & 'so' on?"},
    ],
    "long": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n b "},
        {"role": "user", "content": "line\nline\n\nline"},
        {"role": "assistant", "content": "d", "reasoning_content": "because"},
        {"role": "user", "content": ""},
    ],
}
