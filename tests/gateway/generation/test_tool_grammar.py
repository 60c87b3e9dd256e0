from types import SimpleNamespace
from typing import Any, cast

import pytest

from adapters.dialects.choosing import choose_dialect
from engine.step import SamplingParams
from gateway.generation.tool_grammar import BANNED, without_calls


class MarkTokenizer:
    """One token for each mark, and one for each other character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [7] if text in ("<tool_call>", "<|channel|>") else list(text.encode())


@pytest.mark.parametrize(
    ("style", "banned"),
    [("hermes", True), ("qwen-xml", True), ("llama3", False), ("harmony", False), ("olmo3", False)],
)
def test_the_mark_of_a_call_is_banned_if_it_is_one_token(style: str, banned: bool) -> None:
    dialect = choose_dialect("", style)
    model = cast("Any", SimpleNamespace(dialect=dialect, tokenizer=MarkTokenizer()))
    given = SamplingParams(logit_bias=((7, 5.0), (8, 1.0)))
    expected = ((8, 1.0), (7, BANNED)) if banned else given.logit_bias
    assert without_calls(given, model).logit_bias == expected
