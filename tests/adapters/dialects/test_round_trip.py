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
GRANITE = """\
{%- if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' ~ tools }}{% endif -%}
{%- for m in messages -%}
{{- '<|start_of_role|>' ~ m.role ~ '<|end_of_role|>' -}}
{%- if m.reasoning_content -%}{{- '<think>' ~ m.reasoning_content ~ '</think>' -}}{%- endif -%}
{{- m.content -}}
{%- if m.tool_calls -%}
{{- '<|tool_call|>' ~ (m.tool_calls | map(attribute='function') | list | tojson) -}}
{%- endif -%}{{- '<|end_of_text|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif -%}
"""
PHI = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none -%}
{{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' -}}
{%- else -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""
GEMMA = """\
{%- macro value(v) -%}
{%- if v is string -%}{{- '<escape>' ~ v ~ '<escape>' -}}
{%- elif v is boolean -%}{{- 'true' if v else 'false' -}}
{%- elif v is none -%}null
{%- elif v is mapping -%}
{{- '{' -}}{%- for k in v -%}{{- k ~ ':' -}}{{- value(v[k]) -}}{%- if not loop.last %},{% endif -%}
{%- endfor -%}{{- '}' -}}
{%- elif v is iterable -%}
{{- '[' -}}{%- for x in v -%}{{- value(x) -}}{%- if not loop.last %},{% endif -%}
{%- endfor -%}{{- ']' -}}
{%- else -%}{{- v -}}{%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' -}}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
{{- '<start_function_call>call:' ~ c.function.name ~ value(c.function.arguments) -}}
{{- '<end_function_call>' -}}
{%- endfor -%}
{{- '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}{#- tools -#}
"""
GEMMA_4 = """\
{%- macro value(v) -%}
{%- if v is string -%}{{- '<|"|>' ~ v ~ '<|"|>' -}}
{%- elif v is boolean -%}{{- 'true' if v else 'false' -}}
{%- elif v is mapping -%}
{{- '{' -}}{%- for k, x in v | dictsort -%}{{- k ~ ':' -}}{{- value(x) -}}
{%- if not loop.last %},{% endif -%}{%- endfor -%}{{- '}' -}}
{%- elif v is sequence -%}
{{- '[' -}}{%- for x in v -%}{{- value(x) -}}{%- if not loop.last %},{% endif -%}
{%- endfor -%}{{- ']' -}}
{%- else -%}{{- v -}}{%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
{{- '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' -}}
{%- if m.reasoning_content -%}
{{- '<|channel>thought\n' ~ m.reasoning_content ~ '\n<channel|>' -}}
{%- endif -%}
{%- for c in m.tool_calls or [] -%}
{{- '<|tool_call>call:' ~ c.function.name ~ value(c.function.arguments) ~ '<tool_call|>' -}}
{%- endfor -%}
{{- m.content ~ '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif -%}{#- tools -#}
"""
QWEN_XML = """\
{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\n' -}}
{%- if m.role == 'assistant' -%}
{{- '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
{{- '\n\n<tool_call>\n<function=' ~ c.function.name ~ '>\n' -}}
{%- for k, v in c.function.arguments | items -%}
{{- '<parameter=' ~ k ~ '>\n' -}}
{{- (v | tojson if v is mapping or (v is sequence and v is not string) else v | string) -}}
{{- '\n</parameter>\n' -}}
{%- endfor -%}
{{- '</function>\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif -%}{#- tools -#}
"""
OLMO_3 = """\
{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content -}}
{%- if m.tool_calls -%}
{{- '<function_calls>' -}}
{%- for c in m.tool_calls -%}
{{- c.function.name ~ '(' -}}
{%- for k, v in c.function.arguments | items -%}
{{- k ~ '=' ~ (v | tojson) -}}{%- if not loop.last %}, {% endif -%}
{%- endfor -%}
{{- ')' -}}{%- if not loop.last -%}{{- '\n' -}}{%- endif -%}
{%- endfor -%}
{{- '</function_calls>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}{#- tools -#}
"""
GRANITE_3 = """\
{%- if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' ~ tools }}{% endif -%}
{%- for m in messages -%}
{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif -%}
{#- respond only with <|tool_call|> followed by a JSON list of tools used -#}
"""
BUILTIN_TEMPLATE = load_chat_template(BUILTIN)
assert BUILTIN_TEMPLATE is not None
TEMPLATES = {
    "builtin": (BUILTIN_TEMPLATE.source, "<|im_end|>"),
    "llama": (LLAMA, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "thinking": (THINKING, "<|im_end|>"),
    "granite": (GRANITE, "<|end_of_text|>"),
    "phi": (PHI, "<|end|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "gemma4": (GEMMA_4, "<turn|>"),
    "qwen-xml": (QWEN_XML, "<|im_end|>"),
    "olmo3": (OLMO_3, "<|im_end|>"),
    "granite3": (GRANITE_3, "<|end_of_text|>"),
}


def called(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": f"{i:09}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


NESTED = called(("f", {"a": {"b c": [True, None, -1.5, ["x, y", {}]], "d": "}{<escap"}, "e": ""}))
NESTED_JSON = called(("f", {"a": {"b c": [True, None, -1.5, [")", {}]]}, "e": "</f\n("}))
TYPED = called(("f", {"s": "1", "n": 1, "b": False, "z": None, "o": {"x": [1]}, "u": "<a>\n</a>"}))
SCHEMA = {
    "properties": {
        "a": {"type": "string"},
        "n": {"type": ["array", "integer"]},
        "s": {"type": "string"},
        "b": {"type": "boolean"},
        "z": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "o": {"type": "object"},
    }
}
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
        ("granite", {"content": "Hello."}),
        ("granite", {"content": "", "tool_calls": CALLS}),
        ("granite", {"content": "Yes.", "reasoning_content": "Hm.", "tool_calls": CALLS[:1]}),
        ("phi", {"content": "Hello."}),
        ("phi", {"content": "Let me see.", "tool_calls": CALLS}),
        ("gemma", {"content": "Hello."}),
        ("gemma", {"content": "", "tool_calls": CALLS}),
        ("gemma", {"content": "", "tool_calls": NESTED}),
        ("gemma4", {"content": "Yes.", "reasoning_content": "Hm."}),
        ("gemma4", {"content": "", "tool_calls": CALLS}),
        ("gemma4", {"content": "", "reasoning_content": "Hm.", "tool_calls": CALLS}),
        ("qwen-xml", {"content": "Yes.", "reasoning_content": "Hm."}),
        ("qwen-xml", {"content": "", "tool_calls": CALLS}),
        ("qwen-xml", {"content": "So.", "reasoning_content": "Hm.", "tool_calls": TYPED}),
        ("olmo3", {"content": "Hello."}),
        ("olmo3", {"content": "Well.", "tool_calls": CALLS}),
        ("olmo3", {"content": "", "tool_calls": NESTED_JSON}),
        ("granite3", {"content": "", "tool_calls": CALLS}),
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
    wanted = ToolChoice({"f": SCHEMA, "g": None})
    parser = choose_dialect(source).parser(prompt, wanted, random.Random(1).getrandbits)
    assert parser is not None
    message = finished_choice([*parser.feed(text), *parser.finish()], ChoiceEnd("stop"))
    assert (message.content or "") == answer["content"]
    assert message.reasoning == answer.get("reasoning_content")
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [
        (call["function"]["name"], call["function"]["arguments"])
        for call in answer.get("tool_calls", ())
    ]
