"""ChatML with Hermes-style tools, twice: as the Jinja text that ships, and as Python for training.

The two must agree character by character; the evaluation script checks it on every example.
"""

import json

from examples.builtin_model.corpus.example import Message, Tool

TOOLS_BEFORE = "You may call these functions:\n<tools>"
TOOLS_AFTER = (
    "\n</tools>\nTo call one, answer with\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content -%}
    {%- for part in content if part.text is defined -%}{{- part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set start = 0 -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages and messages[0].role in ['system', 'developer'] -%}
    {{- text(messages[0].content) + '\\n\\n' -}}
    {%- set start = 1 -%}
  {%- endif -%}
  {{- '@TOOLS_BEFORE@' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '@TOOLS_AFTER@' + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[start:] -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- else -%}
    {%- set role = 'system' if message.role == 'developer' else message.role -%}
    {{- '<|im_start|>' + role + '\\n' + text(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function if call.function is defined else call -%}
      {%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
      {%- if function.arguments is string -%}{{- function.arguments -}}
      {%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".replace("@TOOLS_BEFORE@", TOOLS_BEFORE.replace("\n", "\\n")).replace(
    "@TOOLS_AFTER@", TOOLS_AFTER.replace("\n", "\\n")
)

Segment = tuple[str, bool]  # text, is it the assistant's own


def said(message: Message) -> str:
    """The text of one message, tool calls included, as the model reads and writes it."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        arguments = call["function"]["arguments"]
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def tool_turns(messages: list[Message], at: int) -> tuple[str, int]:
    """The tool results that begin at `at`, as one user turn, and where they end."""
    text = "<|im_start|>user"
    while at < len(messages) and messages[at]["role"] == "tool":
        text += f"\n<tool_response>\n{messages[at]['content']}\n</tool_response>"
        at += 1
    return text + "<|im_end|>\n", at


def segments(messages: list[Message], tools: list[Tool]) -> list[Segment]:
    """The conversation in segments; only the assistant's segments have a loss."""
    pieces: list[Segment] = []
    at = 0
    if tools:
        before = ""
        if messages[0]["role"] == "system":
            before, at = messages[0]["content"] + "\n\n", 1
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = f"<|im_start|>system\n{before}{TOOLS_BEFORE}{listed}{TOOLS_AFTER}<|im_end|>\n"
        pieces.append((text, False))
    while at < len(messages):
        message = messages[at]
        if message["role"] == "tool":
            text, at = tool_turns(messages, at)
            pieces.append((text, False))
            continue
        at += 1
        own = message["role"] == "assistant"
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        pieces.append((said(message) + ("<|im_end|>" if own else ""), own))
        pieces.append(("\n" if own else "<|im_end|>\n", False))
    return pieces


def prompt(messages: list[Message], tools: list[Tool]) -> str:
    return "".join(text for text, _ in segments(messages, tools)) + "<|im_start|>assistant\n"
