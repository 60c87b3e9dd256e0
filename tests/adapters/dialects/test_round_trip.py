"""A dialect parses the messages that its chat template writes: they round-trip."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from adapters.dialects.choosing import choose_dialect
from adapters.dialects.jinja_template import JinjaTemplate
from adapters.dialects.loading import load_chat_template
from gateway.ports import ToolChoice
from gateway.schema.rendering import ChoiceEnd, finished_choice

BUILTIN = Path(__file__).parents[3] / "adapters" / "builtin"

# In the style of the families' own templates.
LLAMA = """\
{%- if tools %}{{ '<|begin|>' ~ (tools | tojson) }}{% endif -%}
{%- for m in messages -%}
{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' -}}
{%- if m.tool_calls -%}
{{- '<|python_tag|>{"name": "' ~ m.tool_calls[0].function.name ~ '", "parameters": ' -}}
{{- m.tool_calls[0].function.arguments | tojson -}}{{- '}' -}}
{%- else -%}{{- m.content -}}{%- endif -%}{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""
MISTRAL = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '[INST]' ~ m.content ~ '[/INST]' -}}
{%- else -%}
{{- m.content -}}
{%- if m.tool_calls -%}
{{- '[TOOL_CALLS][' -}}
{%- for c in m.tool_calls -%}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson -}}
{%- if not loop.last %}, {% endif -%}
{%- endfor -%}{{- ']' -}}
{%- endif -%}{{- '</s>' -}}
{%- endif -%}
{%- endfor -%}{#- tools -#}
"""
THINKING = """\
{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\n' -}}
{%- if m.reasoning_content -%}
{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
{{- '\n<tool_call>\n' ~ ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) -}}
{{- '\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif -%}{#- tools -#}
"""
BUILTIN_TEMPLATE = load_chat_template(BUILTIN)
assert BUILTIN_TEMPLATE is not None
TEMPLATES = {
    "builtin": (BUILTIN_TEMPLATE.source, "<|im_end|>"),
    "llama": (LLAMA, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "thinking": (THINKING, "<|im_end|>"),
}


def called(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": f"{i:09}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


CALLS = called(("f", {"a": 'é "quoted" \\ <b>', "n": [1, {}]}), ("g", {}))


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("builtin", {"content": "Hello."}),
        ("builtin", {"content": "", "tool_calls": CALLS}),
        ("builtin", {"content": "Let me see.", "tool_calls": CALLS}),
        ("llama", {"content": "Hello."}),
        ("llama", {"content": "", "tool_calls": CALLS[:1]}),
        ("mistral", {"content": "Hello."}),
        ("mistral", {"content": "Well.", "tool_calls": CALLS}),
        ("thinking", {"content": "Yes.", "reasoning_content": "Hm.\n\nSo."}),
        ("thinking", {"content": "Yes.", "reasoning_content": "Hm.", "tool_calls": CALLS}),
    ],
)
def test_a_message_is_parsed_as_the_template_wrote_it(family: str, answer: dict[str, Any]) -> None:
    source, end = TEMPLATES[family]
    template = JinjaTemplate({"default": source}, {})
    history = [{"role": "user", "content": "Well?"}]
    prompt = template.render(history)
    whole = template.render(
        [*history, {"role": "assistant", **answer}], add_generation_prompt=False
    )
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].rstrip("\n").removesuffix(end)
    wanted = ToolChoice(("f", "g"))
    parser = choose_dialect(source).parser(prompt, wanted, random.Random(1).getrandbits)
    assert parser is not None
    message = finished_choice([*parser.feed(text), *parser.finish()], ChoiceEnd("stop"))
    assert (message.content or "") == answer["content"]
    assert message.reasoning == answer.get("reasoning_content")
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [
        (call["function"]["name"], call["function"]["arguments"])
        for call in answer.get("tool_calls", ())
    ]
