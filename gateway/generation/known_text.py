"""KnownText: a prompt and its output as text and ids, for the prompt that continues it.

A conversation's next prompt mostly begins with the text of the last prompt and its output. Their
ids stay, and only the text behind them is tokenized. The two texts are compared, because a chat
template may render earlier messages differently later, such as without their reasoning. Ids are cut
behind a control token only, since there tokenizers divide a text.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.errors import PromptTooLong
from gateway.generation.prompt import Prompt, token_ids
from gateway.ports import Tokenizer

MAX_BYTES_PER_CHAR = 4
BYTES_PER_HASH = 64  # with its object


class KnownBlocks(NamedTuple):
    """The digests of the leading blocks of a text, and what they depend on beside its ids."""

    hashes: Sequence[bytes]
    size: int  # tokens of a block
    salt: str
    lora_digest: str


@dataclass(frozen=True, slots=True)
class KnownText:
    """A text and its ids. The bytes of the ids are those of the text."""

    text: str
    ids: "array[int]" = field(repr=False)
    blocks: KnownBlocks | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        """Its memory, at most."""
        num_hashes = 0 if self.blocks is None else len(self.blocks.hashes)
        size = MAX_BYTES_PER_CHAR * len(self.text) + self.ids.itemsize * len(self.ids)
        return size + BYTES_PER_HASH * num_hashes


class ContinuedIds(NamedTuple):
    """The ids of a text, of which the first `num_kept` are those of a known text. The last of these
    is a control token, which begins at character `mark_at`."""

    ids: Prompt
    num_kept: int = 0
    mark_at: int = 0


def known_text(
    prompt: str,
    ids: Prompt,
    output: Sequence[int],
    tokenizer: Tokenizer,
    blocks: KnownBlocks | None = None,
) -> KnownText:
    """The text of a prompt and its output; without the output if its bytes are not valid UTF-8."""
    try:
        written = b"".join(map(tokenizer.token_bytes, output)).decode()
    except UnicodeDecodeError:
        return KnownText(prompt, array("i", ids), blocks)
    return KnownText(prompt + written, array("i", [*ids, *output]), blocks)


def continued_ids(
    tokenizer: Tokenizer, known: KnownText, text: str, most: int | None
) -> ContinuedIds:
    """The ids of a text, of which those of the known text's beginning stay.

    Raises as `token_ids` does.
    """
    cut, start = _cut(tokenizer, known, num_shared(known.text, text))
    if not cut:
        return ContinuedIds(
            token_ids(tokenizer, text, "messages", add_special_tokens=False, most=most)
        )
    mark = known.ids[cut - 1]
    # The rest is tokenized from its control token on, so that it is not the beginning of a text.
    try:
        left = None if most is None else max(0, most - cut + 1)
        rest = token_ids(tokenizer, text[start:], "messages", add_special_tokens=False, most=left)
    except PromptTooLong as error:
        num_kept = cut - 1
        raise PromptTooLong(
            num_kept + error.min_tokens, num_kept + error.limit, "messages"
        ) from None
    if rest[0] != mark:
        return ContinuedIds(
            token_ids(tokenizer, text, "messages", add_special_tokens=False, most=most)
        )
    return ContinuedIds((*known.ids[:cut], *rest[1:]), cut, start)


def num_shared(first: str, second: str) -> int:
    """The number of characters with which both texts begin."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high - 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _cut(tokenizer: Tokenizer, known: KnownText, num_shared: int) -> tuple[int, int]:
    """How many of the known ids lie within the shared text and end with a control token, and where
    in the text this token begins. Zeros if none does."""
    ids, special_ids = known.ids, tokenizer.special_ids
    beyond = len(known.text[num_shared:].encode())
    at, size, pieces = len(ids), 0, []
    while at and (size < beyond or ids[at - 1] not in special_ids):
        at -= 1
        pieces.append(tokenizer.token_bytes(ids[at]))
        size += len(pieces[-1])
    if not at:
        return 0, 0
    mark = tokenizer.token_bytes(ids[at - 1])
    tail = (mark + b"".join(reversed(pieces))).decode(errors="replace")
    is_exact = known.text.endswith(tail) and bool(mark)
    return (at, len(known.text) - len(tail)) if is_exact else (0, 0)
