"""Inputs of pooling requests to token ids: texts, ids, and pairs of texts."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from engine.errors import InvalidRequest
from gateway.generation.prompt import Prompt, fits_on_loop, token_ids
from gateway.generation.threads import run_in_thread
from gateway.ports import EncodesPairs

if TYPE_CHECKING:
    from gateway.ports import Tokenizer


class PairInput(NamedTuple):
    """Two texts that the model reads as two segments."""

    first: str
    second: str


class TemplatedInput(NamedTuple):
    """A prompt made of a pair of texts; `end` is what stands behind the second one."""

    text: str
    end: str

    @classmethod
    def of(cls, template: str, query: str, document: str) -> Self:
        """The prompt by a template with `{query}` and, behind it, `{document}`."""
        begin, _, rest = template.partition("{query}")
        middle, _, end = rest.partition("{document}")
        return cls(f"{begin}{query}{middle}{document}{end}", end)


PoolingInput = str | tuple[int, ...] | PairInput | TemplatedInput


class TokenizedInput(NamedTuple):
    """The ids of an input. `first_len` is the number of tokens of a pair's first text; the last
    `num_end` tokens stay if the input is truncated."""

    ids: Prompt
    first_len: int | None = None
    num_end: int = 0


async def tokenize_inputs(
    tokenizer: "Tokenizer", inputs: Sequence[PoolingInput], fields: Sequence[str]
) -> list[TokenizedInput]:
    """The ids of all inputs, with the special tokens that the model expects around a text.

    Many or long texts are tokenized in a thread. Raises `InvalidRequest` that names one of `fields`
    for text that is not valid Unicode.
    """

    def tokenize() -> list[TokenizedInput]:
        return [_tokenized(tokenizer, *row) for row in zip(inputs, fields, strict=True)]

    texts = [text for each in inputs for text in _texts(each)]
    return tokenize() if fits_on_loop(texts, len(texts)) else await run_in_thread(tokenize)


def _texts(each: PoolingInput) -> Iterator[str]:
    if isinstance(each, str):
        yield each
    elif isinstance(each, PairInput | TemplatedInput):
        yield from each


def _tokenized(tokenizer: "Tokenizer", each: PoolingInput, field: str) -> TokenizedInput:
    if isinstance(each, PairInput):
        return _tokenized_pair(tokenizer, each, field)
    if isinstance(each, TemplatedInput):
        ids = token_ids(tokenizer, each.text, field, add_special_tokens=False)
        end = token_ids(tokenizer, each.end, field, add_special_tokens=False)
        return TokenizedInput(ids, None, len(end))
    if isinstance(each, str):
        each = token_ids(tokenizer, each, field, add_special_tokens=True)
    return TokenizedInput(each, None, _num_special_at_end(tokenizer, each))


def _tokenized_pair(tokenizer: "Tokenizer", pair: PairInput, field: str) -> TokenizedInput:
    assert isinstance(tokenizer, EncodesPairs), "a model that scores pairs has a tokenizer for them"
    try:
        ids, first_len = tokenizer.encode_pair(*pair)
    except UnicodeEncodeError as error:
        message = f"'{field}' is not valid Unicode: it has an unpaired surrogate."
        raise InvalidRequest(message, field) from error
    return TokenizedInput(tuple(ids), first_len, _num_special_at_end(tokenizer, ids))


def _num_special_at_end(tokenizer: "Tokenizer", ids: Sequence[int]) -> int:
    return int(len(ids) > 1 and ids[-1] in tokenizer.special_ids)
