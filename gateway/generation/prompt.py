"""Prompts to token ids. Short ones at once, long ones in a thread off the loop.

The threads are those of the loop's default executor: whoever runs the loop owns and bounds them.
Tokenizers release the interpreter's lock on long texts, so the loop goes on meanwhile.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from gateway.ports import StreamParser, Tokenizer

Prompt = tuple[int, ...]

# What is read at once: under 3 ms with the slowest tokenizer. A prompt or a message costs as
# much as so many characters, however short it is.
_MAX_CHARS_ON_LOOP = 4_096
_CHARS_PER_PART = 128


class TokenizedPrompts(NamedTuple):
    """Prompts as token ids, and who reads the answers; without a parser all is content.

    `shown` are control tokens that the parser must see, and their texts.
    """

    prompts: Sequence[Prompt]
    parser: "Callable[[], StreamParser] | None" = None  # a fresh one for each answer
    shown: Mapping[int, bytes] = MappingProxyType({})


async def text_prompts(
    tokenizer: "Tokenizer", prompts: Sequence[str | Sequence[int]]
) -> TokenizedPrompts:
    """The ids of each prompt, in order; a prompt that is ids already stays as it is.

    Raises `InvalidRequest` for text that is not Unicode.
    """

    def read() -> list[Prompt]:
        return [
            token_ids(tokenizer, prompt, "prompt", add_special_tokens=True)
            if isinstance(prompt, str)
            else tuple(prompt)
            for prompt in prompts
        ]

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return TokenizedPrompts(
        read() if fits_on_loop(texts, len(texts)) else await asyncio.to_thread(read)
    )


def fits_on_loop(texts: Iterable[str | bytes | None], num_parts: int) -> bool:
    """Whether so much may be read on the loop."""
    num_chars = sum(len(text) for text in texts if text)
    return num_chars + _CHARS_PER_PART * num_parts <= _MAX_CHARS_ON_LOOP


def token_ids(tokenizer: "Tokenizer", text: str, param: str, *, add_special_tokens: bool) -> Prompt:
    """The ids of a text; `InvalidRequest` naming `param` if it is not Unicode."""
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except UnicodeEncodeError as error:
        message = f"'{param}' is not valid Unicode: it has half of a surrogate pair."
        raise InvalidRequest(message, param) from error
