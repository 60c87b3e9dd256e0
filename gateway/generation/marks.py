"""Where the messages of a conversation end in its prompt, and where its cache breakpoints are.

A chat template may change a message, so its text is looked for in the prompt. What is not found is
passed over: a breakpoint only says where other requests will probably go on.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gateway.generation.paced_tokenizer import token_ends
from gateway.schema.fields.caching import MAX_BREAKPOINTS

if TYPE_CHECKING:
    from gateway.ports import Tokenizer
    from gateway.schema.openai.messages import Message


class PromptMarks(NamedTuple):
    """Tokens of a prompt up to the end of each message, and up to each breakpoint."""

    message_ends: Sequence[int]
    breakpoints: Sequence[int]


NO_MARKS = PromptMarks((), ())


def marks_of(
    messages: "Sequence[Message]", text: str, ids: Sequence[int], tokenizer: "Tokenizer"
) -> PromptMarks:
    """The marks of a prompt with these ids, which was rendered from the messages."""
    ends: list[int] = []
    breakpoints: list[int] = []
    at = num_bytes = 0
    for message in messages:
        content = message.text
        stripped = content.strip()
        start = text.find(stripped, at) if stripped else -1
        if start >= 0:
            num_skipped = content.index(stripped)
            for offset in message.breakpoints:
                inside = min(max(0, offset - num_skipped), len(stripped))
                breakpoints.append(num_bytes + _num_bytes(text[at : start + inside]))
            num_bytes += _num_bytes(text[at : start + len(stripped)])
            at = start + len(stripped)
        ends.append(num_bytes)
    of_tokens = token_ends(tokenizer, ids)
    latest = breakpoints[-MAX_BREAKPOINTS:]
    return PromptMarks(
        [bisect_right(of_tokens, end) for end in ends],
        [bisect_right(of_tokens, each) for each in latest],
    )


def _num_bytes(text: str) -> int:
    return len(text.encode())
