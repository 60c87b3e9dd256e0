from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adapters
from adapters.dialects.loading import load_chat_template
from adapters.tokenizers.loading import load_tokenizer
from gateway.errors import PromptTooLong
from gateway.generation.known_text import KnownText, continued_ids, known_text

BUILTIN = Path(adapters.__file__).parent / "builtin"
TOKENIZER = load_tokenizer(BUILTIN)
TEMPLATE = load_chat_template(BUILTIN)
END = TOKENIZER.special_tokens["<|im_end|>"]
CONTENT = st.text(max_size=20) | st.sampled_from(
    ["Grüße 🙂", "<|im_end|>", "a<|im_start|>b", " \n"]
)


def render(messages: list[dict[str, Any]]) -> str:
    assert TEMPLATE is not None
    return TEMPLATE.render(messages)


def encoded(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def a_message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


class Counting:
    """The tokenizer, which counts the characters that it tokenizes."""

    def __init__(self) -> None:
        self.num_chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_chars += len(text)
        return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)

    def encode_pieces(self, text: str, *, add_special_tokens: bool) -> Any:
        yield self.encode(text, add_special_tokens=add_special_tokens)


@given(st.lists(CONTENT, min_size=1, max_size=5), CONTENT, CONTENT, st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_ids_are_those_of_the_whole_text(
    contents: list[str], answer: str, question: str, ends: bool
) -> None:
    messages = [a_message("user", content) for content in contents]
    prompt = render(messages)
    output = [*encoded(answer), *([END] if ends else [])]
    known = known_text(prompt, encoded(prompt), output, TOKENIZER)
    text = render([*messages, a_message("assistant", answer), a_message("user", question)])
    assert continued_ids(TOKENIZER, known, text, None).ids == encoded(text)
    changed = render([a_message("system", "new"), *messages])
    assert continued_ids(TOKENIZER, known, changed, None).ids == encoded(changed)
    assert continued_ids(TOKENIZER, known, prompt, None).ids == encoded(prompt)


def test_only_the_text_behind_the_known_one_is_tokenized() -> None:
    history = [a_message("user", "word " * 1000)]
    prompt = render(history)
    known = known_text(prompt, encoded(prompt), [*encoded("Yes."), END], TOKENIZER)
    text = render([*history, a_message("assistant", "Yes."), a_message("user", "And?")])
    counting: Any = Counting()
    assert continued_ids(counting, known, text, None).ids == encoded(text)
    assert counting.num_chars < 80


def test_generated_ids_stay_though_the_text_has_shorter_ones() -> None:
    history = [a_message("user", "hi")]
    prompt = render(history)
    output = [next(iter(encoded(letter))) for letter in "word"]
    assert len(encoded("word")) < len(output)
    known = known_text(prompt, encoded(prompt), [*output, END], TOKENIZER)
    text = render([*history, a_message("assistant", "word"), a_message("user", "x")])
    ids = continued_ids(TOKENIZER, known, text, None).ids
    assert ids[: len(known.ids)] == tuple(known.ids)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == text


def test_an_output_that_is_no_text_is_not_known() -> None:
    smile = encoded("🙂")
    assert len(smile) > 1
    assert known_text("a", (1,), smile[:1], TOKENIZER) == KnownText("a", array("i", (1,)))


def test_a_prompt_that_is_too_long_says_so_with_the_limit_of_the_model() -> None:
    prompt = render([a_message("user", "hi")])
    known = known_text(prompt, encoded(prompt), [END], TOKENIZER)
    text = render(
        [a_message("user", "hi"), a_message("assistant", ""), a_message("user", "a b " * 500)]
    )
    with pytest.raises(PromptTooLong) as caught:
        continued_ids(TOKENIZER, known, text, 50)
    assert caught.value.limit == 50
