"""Where the messages of a conversation end in its prompt, and where its cache breakpoints are.

A chat template may change a message, so its text is looked for in the prompt. What is not found is
passed over: a breakpoint only says where other requests will probably go on.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gateway.generation.paced_tokenizer import token_ends
from gateway.schema.fields.scheduling import MAX_BREAKPOINTS

if TYPE_CHECKING:
    from engine.media import Media
    from gateway.ports import Tokenizer
    from gateway.schema.openai.messages import Message


class PromptMarks(NamedTuple):
    """Tokens of a prompt up to the end of each message, and up to each breakpoint."""

    message_ends: Sequence[int]
    breakpoints: Sequence[int]

    @property
    def last(self) -> int:
        """The tokens up to the last of them."""
        return max((*self.message_ends[-1:], *self.breakpoints[-1:]), default=0)

    def followed_by(self, added: "PromptMarks", num_tokens: int) -> "PromptMarks":
        """The marks of a longer prompt, of which others are those behind so many tokens."""
        ends = [*self.message_ends, *(num_tokens + each for each in added.message_ends)]
        latest = [*self.breakpoints, *(num_tokens + each for each in added.breakpoints)]
        return PromptMarks(ends, latest[-MAX_BREAKPOINTS:])


NO_MARKS = PromptMarks((), ())


def marks_of(
    messages: "Sequence[Message]",
    text: str,
    ids: Sequence[int],
    tokenizer: "Tokenizer",
    media: "Sequence[Media]" = (),
    begin: int = 0,
) -> PromptMarks:
    """The marks of a prompt with these ids, which was rendered from the messages. The text is that
    of all ids but those of `media`, which stand for images. The messages lie behind its first
    `begin` characters."""
    ends: list[int] = []
    breakpoints: list[int] = []
    at, num_bytes = begin, _num_bytes(text[:begin])
    for message in messages:
        for content, offsets in message.texts:
            stripped = content.strip()
            start = text.find(stripped, at) if stripped else -1
            if start >= 0:
                num_skipped = content.index(stripped)
                for offset in offsets:
                    inside = min(max(0, offset - num_skipped), len(stripped))
                    breakpoints.append(num_bytes + _num_bytes(text[at : start + inside]))
                num_bytes += _num_bytes(text[at : start + len(stripped)])
                at = start + len(stripped)
        ends.append(num_bytes)
    of_tokens = token_ends(tokenizer, _without_images(ids, media))
    latest = breakpoints[-MAX_BREAKPOINTS:]
    return PromptMarks(
        [_with_images(bisect_right(of_tokens, end), media) for end in ends],
        [_with_images(bisect_right(of_tokens, each), media) for each in latest],
    )


def _without_images(ids: Sequence[int], media: "Sequence[Media]") -> Sequence[int]:
    """The ids but those that stand for images."""
    others: list[int] = []
    starts = [0, *(each.end for each in media)]
    for start, stop in zip(starts, [*(each.start for each in media), len(ids)], strict=True):
        others += ids[start:stop]
    return others if media else ids


def _with_images(num_ids: int, media: "Sequence[Media]") -> int:
    """How many leading tokens so many others are, with the images before the last of them."""
    for each in media:
        if each.start >= num_ids:
            break
        num_ids += each.num_tokens
    return num_ids


def _num_bytes(text: str) -> int:
    return len(text.encode())
