"""Inputs of pooling requests to token ids: texts, ids, and pairs of texts."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gateway.generation.prompt import Prompt, fits_on_loop, token_ids

if TYPE_CHECKING:
    from gateway.ports import Tokenizer


PoolingInput = str | tuple[int, ...]


class TokenizedInput(NamedTuple):
    """The ids of an input; of a pair of texts also the number of tokens of the first one."""

    ids: Prompt
    first_len: int | None = None


async def tokenize_inputs(
    tokenizer: "Tokenizer", inputs: Sequence[PoolingInput], param: str
) -> list[TokenizedInput]:
    """The ids of all inputs, with the special tokens that the model expects around a text.

    Many or long texts are tokenized in a thread. Raises `InvalidRequest` that names `param` for
    text that is not valid Unicode.
    """

    def tokenize() -> list[TokenizedInput]:
        return [_tokenized(tokenizer, each, param) for each in inputs]

    texts = [each for each in inputs if isinstance(each, str)]
    return tokenize() if fits_on_loop(texts, len(texts)) else await asyncio.to_thread(tokenize)


def _tokenized(tokenizer: "Tokenizer", each: PoolingInput, param: str) -> TokenizedInput:
    if isinstance(each, str):
        return TokenizedInput(token_ids(tokenizer, each, param, add_special_tokens=True))
    return TokenizedInput(each)
