import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from engine.errors import InvalidRequest
from gateway.generation.prompt import tokenize_prompts


class Letters:
    """Ids are code points; BOS is 0. Records the threads that encoded."""

    vocab_size = 0x110000
    special_ids = frozenset({0})
    special_tokens: Mapping[str, int] = MappingProxyType({"<s>": 0})

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.add(threading.current_thread())
        text.encode()
        return [0] * add_special_tokens + [*map(ord, text)]

    def decoder(self) -> Any:
        raise AssertionError("nothing is decoded here")

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    @property
    def stayed_on_the_loop(self) -> bool:
        return self.threads == {threading.current_thread()}


async def test_text_prompts_get_the_models_special_tokens() -> None:
    letters = Letters()
    assert (await tokenize_prompts(letters, ["ab", "", "é"])).prompts == [
        (0, 97, 98),
        (0,),
        (0, 0xE9),
    ]
    assert letters.stayed_on_the_loop


async def test_prompts_of_ids_stay_as_they_are() -> None:
    letters = Letters()
    assert (await tokenize_prompts(letters, [[5, 6], (7,)])).prompts == [(5, 6), (7,)]
    assert (await tokenize_prompts(letters, [tuple(range(100_000))])).prompts == [
        tuple(range(100_000))
    ]
    assert not letters.threads


@pytest.mark.parametrize("prompts", [["x" * 5000], ["x"] * 100])
async def test_long_texts_are_tokenized_off_the_loop(prompts: list[str]) -> None:
    letters = Letters()
    expected = [(0, *map(ord, prompt)) for prompt in prompts]
    assert (await tokenize_prompts(letters, prompts)).prompts == expected
    assert not letters.stayed_on_the_loop


@pytest.mark.parametrize("size", [1, 5000])
async def test_an_unpaired_surrogate_is_an_invalid_request(size: int) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as text:
        await tokenize_prompts(Letters(), ["a" * size + "\ud83d"])
    assert text.value.param == "prompt"
