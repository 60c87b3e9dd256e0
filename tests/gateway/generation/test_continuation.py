"""A prompt that is continued from a window of its conversation is that of all messages, or it is
rendered as a whole."""

import re
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from adapters.dialects.jinja_template import JinjaTemplate
from engine.errors import InvalidRequest
from gateway.generation.continuation import Continuation, OtherBeginningError, is_part
from gateway.generation.conversation import _template_messages
from gateway.generation.known_text import known_text
from gateway.generation.prompt import NO_MARKS, marks_of
from gateway.schema.decoding import UnknownFields
from gateway.schema.openai.chat import ChatRequest
from gateway.schema.responses.request import decode_response
from gateway.schema.responses.tools import read_tools
from gateway.schema.responses.window import MIN_ITEMS, window_of
from tests.adapters.dialects import templates
from tests.gateway.scripted_model import ByteTokenizer

Item = dict[str, Any]

# Reasoning stays behind the last question only, and results of tools are grouped.
AGENT = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if ns.last < 0 %}{{ raise_exception("no question") }}{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}{{ "<|assistant|>" }}
{%- if message.reasoning_content and loop.index0 > ns.last %}{{ "<think>" + message.reasoning_content + "</think>" }}{% endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}{{ "<call>" + call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{{- "<|end|>" }}
{%- elif message.role == "tool" %}
{%- if messages[loop.index0 - 1].role != "tool" %}{{ "<|tools|>" }}{% endif %}{{ "<result>" + message.content }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|end|>" }}{% endif %}
{%- else %}{{ "<|" + message.role + "|>" + message.content + "<|end|>" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""  # noqa: E501 # a template
# The number of messages comes first; reasoning stays in the last three answers.
COUNTING = "{{ messages | length }} messages.<|end|>" + AGENT
RECENT = AGENT.replace("loop.index0 > ns.last", "loop.index0 > messages | length - 6")
ALL = {**templates.ALL, "agent": AGENT, "counting": COUNTING, "recent": RECENT}
APPENDING = ("chatml", "agent")  # templates that continue most turns
MARK = re.compile(r"(<\|[a-z_]+\|>)")


class MarksTokenizer(ByteTokenizer):
    """Bytes, and an id for each control token of the templates."""

    names = ("system", "user", "assistant", "tools", "end", "im_start", "im_end", "eot")
    special_tokens = MappingProxyType({f"<|{name}|>": 300 + i for i, name in enumerate(names)})
    special_ids = frozenset(special_tokens.values())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for piece in MARK.split(text):
            known = self.special_tokens.get(piece)
            ids += piece.encode() if known is None else (known,)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        texts = {token: text for text, token in self.special_tokens.items()}
        return texts[token_id].encode() if token_id >= 300 else bytes([token_id])


TOKENIZER = MarksTokenizer()


def chat(items: Sequence[Item]) -> ChatRequest:
    request = decode_response(b'{"model": "m", "input": "x"}')
    return request.as_chat(items, read_tools((), UnknownFields()))


@cache
def template_of(source: str) -> JinjaTemplate:
    return JinjaTemplate({"default": source}, {"eos_token": "<|end|>", "bos_token": ""})


def rendered(source: str, request: ChatRequest) -> str:
    template = template_of(source)
    return template.render(_template_messages(request), add_generation_prompt=True)


def text_item(role: str, text: str) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def an_answer(number: int, text: str, *, thinks: bool, num_calls: int) -> list[Item]:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": f"R{number}"}]}
    calls = [
        {"type": "function_call", "call_id": f"{number}.{i}", "name": "f", "arguments": "{}"}
        for i in range(num_calls)
    ]
    return [*([reasoning] if thinks else []), text_item("assistant", text), *calls]


def turns(steps: Sequence[tuple[bool, bool, int, str]]) -> list[tuple[list[Item], list[Item]]]:
    """The new items of each turn and its answer: results of the calls before, or a question."""
    conversation: list[tuple[list[Item], list[Item]]] = []
    new = [text_item("system", "Be brief."), text_item("user", "first")]
    for number, (asks, thinks, num_calls, text) in enumerate(steps):
        answer = an_answer(number, text, thinks=thinks, num_calls=num_calls)
        conversation.append((new, answer))
        new = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": f"{text}!"}
            for item in answer
            if item["type"] == "function_call"
        ]
        if asks or not new:
            new = [*new, text_item("user", f"{text}?")]
    return conversation


def continued(source: str, conversation: Sequence[tuple[list[Item], list[Item]]]) -> int:
    """How many turns were continued from their windows. Each has the prompt of all its items."""
    items: list[Item] = []
    num_continued = num_prompt_items = 0
    prompt = ""
    marks_before = NO_MARKS
    output: list[int] = []
    for new, answer in conversation:
        whole = chat([*items, *new])
        text = rendered(source, whole)
        ids = tuple(TOKENIZER.encode(text, add_special_tokens=False))
        marks = marks_of(whole.messages, text, ids, TOKENIZER)
        window = window_of(items, num_prompt_items, new)
        if window is not None:
            before, earlier = TOKENIZER.encode(prompt, add_special_tokens=False), window.earlier
            known = known_text(prompt, tuple(before), output, TOKENIZER)
            request, last = chat(window.now), marks_before
            continuation = Continuation(known, len(prompt), len(before), last, chat(earlier))
            try:
                texts = (rendered(source, chat(earlier)), rendered(source, request))
                found = continuation.prompt(*texts, request, TOKENIZER, None)
            except (OtherBeginningError, InvalidRequest):
                pass
            else:
                num_continued += 1
                assert (found.text, found.ids) == (text, ids)
                if source in (templates.CHATML, AGENT):  # which render every text
                    assert found.marks == marks
                assert ids[: found.num_kept] == tuple(known.ids[: found.num_kept])
        items, prompt, marks_before = [*items, *new], text, marks
        num_prompt_items = len(items)
        output = TOKENIZER.encode(answer[-1].get("name", "said"), add_special_tokens=False)
        items += answer
    return num_continued


STEPS = st.lists(
    st.tuples(
        st.booleans(), st.booleans(), st.integers(0, 2), st.sampled_from(["QQ", "Grüße 🙂", "XY "])
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("name", ALL)
@given(STEPS)
@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
def test_every_prompt_is_that_of_all_messages(
    name: str, steps: list[tuple[bool, bool, int, str]]
) -> None:
    if name == "strict":  # it takes no tools
        steps = [(asks, thinks, 0, text) for asks, thinks, _, text in steps]
    continued(ALL[name], turns(steps))


@pytest.mark.parametrize("name", ALL)
def test_only_templates_that_append_are_continued(name: str) -> None:
    calls = turns([(False, False, 1, "QQ")] * 30)
    chats = turns([(True, False, 0, "XY")] * 30)
    calls = chats if name == "strict" else calls
    num_late = 30 - MIN_ITEMS
    if name in APPENDING:
        assert min(continued(ALL[name], calls), continued(ALL[name], chats)) >= num_late
    if name in ("counting", "strict", "thinking"):
        assert continued(ALL[name], calls) == continued(ALL[name], chats) == 0


def test_a_new_question_after_reasoning_renders_what_lost_it() -> None:
    steps = [(False, number < 3, 1, "QQ") for number in range(20)]
    steps[-1] = (True, False, 0, "QQ")
    assert continued(AGENT, turns([*steps, (True, False, 0, "XY")])) >= 8


def test_an_answer_among_the_new_items_is_no_continuation() -> None:
    items = [text_item("user" if i % 2 == 0 else "assistant", f"{i}") for i in range(40)]
    assert window_of(items, 39, [text_item("user", "more")]) is not None
    assert window_of(items, 39, [text_item("assistant", "no"), text_item("user", "more")]) is None
    assert window_of(items, 39, [text_item("system", "other")]) is None


@pytest.mark.parametrize(
    ("short", "is_one"),
    [
        ("abcdef", True),
        ("abef", True),
        ("abccef", False),
        ("acf", True),
        ("fa", False),
        ("abcdefg", False),
    ],
)
def test_a_window_has_the_text_of_the_whole_but_for_its_middle(short: str, is_one: bool) -> None:
    assert is_part(short, "abcdef") is is_one
