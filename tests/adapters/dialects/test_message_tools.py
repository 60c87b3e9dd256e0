import json
from typing import Any

import pytest

from adapters.dialects.calls.bare_call import parse_bare_call
from adapters.dialects.calls.tool_calls import NotACall
from adapters.dialects.jinja_template import JinjaTemplate
from tests.adapters.dialects.templates import TOOLS
from tests.adapters.dialects.test_round_trip import PHI, called

USER = {"role": "user", "content": "Well?"}


def rendered(messages: list[dict[str, Any]], **variables: Any) -> str:
    return JinjaTemplate({"default": PHI}, {}).render(messages, **variables)


def test_tools_are_rendered_in_the_system_message() -> None:
    functions = json.dumps([TOOLS[0]["function"]], ensure_ascii=False)
    own = rendered([{"role": "system", "content": "Be brief."}, USER], tools=TOOLS)
    assert own.startswith(f"<|system|>Be brief.<|tool|>{functions}<|/tool|><|end|><|user|>Well?")
    default = rendered([USER], tools=TOOLS)
    assert default.startswith("<|system|>You are a helpful assistant with some tools.<|tool|>[{")
    assert rendered([USER]) == "<|user|>Well?<|end|><|assistant|>"


def test_calls_and_their_results_are_rendered_in_order() -> None:
    calls = called(("f", {"a": 1}))
    history: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "000000000", "content": "two"},
    ]
    written = '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>'
    expected = f"<|assistant|>{written}<|end|><|tool_response|>two<|end|><|assistant|>"
    assert rendered(history).endswith(expected)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("call:f{}", {}),
        ("call: f {a:<q>x<q>, b : [1, 2.5,-3]}", {"a": "x", "b": [1, 2.5, -3]}),
        ("call:f{<q>odd: key<q>:word,n:None}", {"odd: key": "word", "n": None}),
    ],
)
def test_a_bare_call_is_read(text: str, arguments: dict[str, Any]) -> None:
    assert parse_bare_call(text, "<q>") == ("f", arguments)


@pytest.mark.parametrize(
    "text",
    ["", "f{}", "call:f", "call:f{", "call:f{a}", "call:f{a:}", "call:f{a:<q>x}", "call:f{a:1",
     "call:f{a:1}x", "call:f{a:1,}", "call:f[1]", "call:f" + "{a:" * 99 + "1" + "}" * 99],
)  # fmt: skip
def test_text_that_only_resembles_a_bare_call_is_none(text: str) -> None:
    with pytest.raises(NotACall):
        parse_bare_call(text, "<q>")
