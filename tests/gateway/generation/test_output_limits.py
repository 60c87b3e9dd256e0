import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import GrammarError, Matcher
from gateway.schema.openai.chat import chat_of
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, CONTEXT, TEXT, USER, Rig, chat, played, text
from tests.gateway.scripted_model import END, byte_grammars

GRAMMARS = byte_grammars()
WORDS = st.lists(
    st.text(st.sampled_from("ab/\\.*(\n é"), min_size=1, max_size=3), min_size=1, max_size=3
)


def matcher_of(**fields: Any) -> Matcher:
    constraint = chat_of({"model": "m", "messages": USER, **fields}).constraint()
    assert constraint is not None
    return GRAMMARS.compile(constraint.grammar)


def accepts(matcher: Matcher, output: str) -> bool:
    try:
        matcher.feed(list(output.encode()))
    except GrammarError:
        return False
    return matcher.mask().accepts


@settings(deadline=None, max_examples=100)
@given(words=WORDS, output=st.text(st.sampled_from("ab/\\.*(\n éx"), max_size=12))
def test_an_output_is_allowed_if_it_has_no_bad_word(words: list[str], output: str) -> None:
    expected = not any(word in output for word in words)
    assert accepts(matcher_of(bad_words=words), output) == expected


def test_only_allowed_tokens_are_allowed() -> None:
    bits = matcher_of(allowed_token_ids=[72, 105, 72]).mask().bits
    assert [i for i in range(END) if bits[i >> 3] >> (i & 7) & 1] == [72, 105]


@pytest.mark.parametrize(("token_ids", "never_ends"), [([72], True), ([72, END], False)])
@played()
async def test_an_output_of_allowed_tokens_ends_only_with_an_allowed_end_token(
    rig: Rig, token_ids: list[int], never_ends: bool
) -> None:
    exchange = await rig.client.post(CHAT, chat(allowed_token_ids=token_ids))
    assert exchange.status == 200
    (request,) = rig.ended
    assert (END in request.spec.avoided_ids) == never_ends
    assert END in request.spec.end_ids


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, END + 1]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [1] * 10_001}, "allowed_token_ids"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": ["a"], "guided_regex": "b"}, "bad_words"),
        ({"bad_words": ["a"], "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"stop": [str(i) for i in range(17)]}, "stop"),
    ],
)
@played(run=asyncio.run)
async def test_the_error_names_the_field(
    rig: Rig, path: str, fields: dict[str, Any], param: str
) -> None:
    body = chat(**fields) if path == CHAT else text(**fields)
    exchange = await rig.client.post(path, body)
    assert (exchange.status, exchange.json["error"]["param"]) == (400, param)


def test_sixteen_stop_strings_are_allowed() -> None:
    stops = [*(str(i) for i in range(15)), "o!"]
    body = answer_to(CHAT, chat(stop=stops)).json
    assert body["choices"][0]["message"]["content"] == "Hell"


@pytest.mark.parametrize(
    ("keep", "expected"), [(3, "xyz"), (300, "abcxyz"), (-1, "abcxyz"), (None, "abcxyz")]
)
@played()
async def test_a_prompt_is_truncated_to_its_last_tokens(
    rig: Rig, keep: int | None, expected: str
) -> None:
    body = text(prompt=["abcxyz"] * 2, truncate_prompt_tokens=keep, n=2)
    usage = (await rig.client.post(TEXT, body)).json["usage"]
    assert usage["prompt_tokens"] == 2 * len(expected)
    for request in rig.ended:
        assert bytes(request.spec.prompt).decode() == expected


@played()
async def test_a_prompt_is_truncated_to_the_context(rig: Rig) -> None:
    body = chat(
        messages=[{"role": "user", "content": "a" * 500}],
        truncate_prompt_tokens=-1,
        max_tokens=20,
    )
    assert (await rig.client.post(CHAT, body)).status == 200
    (request,) = rig.ended
    assert len(request.spec.prompt) == CONTEXT - 20
