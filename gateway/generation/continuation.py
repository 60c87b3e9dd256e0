"""Continuation: the prompt of a conversation's turn without rendering all of its messages.

    the prompt before, of all messages      A   X   B
    rendered of a window, as before         A   U   B         U: the last question, a part of X
    rendered of it, with what is new        A   U   B   N
    the prompt of this turn                 A   X   B   N

The first is known, and the second and third are short. If they have this form, the template appends
what is new, and does not look at what the window leaves out. Otherwise all is rendered.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from gateway.generation.known_text import KnownText, continued_ids, num_shared
from gateway.generation.prompt import Prompt, PromptMarks, marks_of
from gateway.ports import Tokenizer
from gateway.schema.openai.chat import ChatRequest

_SETTINGS = (
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort",
    "verbosity", "chat_template_kwargs",
)  # fmt: skip


class OtherBeginningError(Exception):
    """The prompt of a turn is not that of its window with more in the middle."""


class ContinuedPrompt(NamedTuple):
    """The prompt of a turn, of which the first `num_kept` ids are known."""

    text: str
    ids: Prompt
    marks: PromptMarks
    num_kept: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """What is known before a turn: the text, of which the first `num_chars` characters and
    `num_ids` ids are the last prompt, its marks, and the messages of the window as it had them."""

    known: KnownText
    num_chars: int
    num_ids: int
    marks: PromptMarks
    earlier: ChatRequest

    def prompt(
        self, earlier: str, now: str, request: ChatRequest, tokenizer: Tokenizer, most: int | None
    ) -> ContinuedPrompt:
        """The prompt whose window is rendered as `now`, and was rendered as `earlier` before the
        new messages of `request`. Raises `OtherBeginningError`, and as `token_ids` does."""
        before, num_messages = self.known.text[: self.num_chars], len(self.earlier.messages)
        is_longer = request.messages[:num_messages] == self.earlier.messages
        if not (is_longer and now.startswith(earlier) and is_part(earlier, before)):
            raise OtherBeginningError
        text = before + now[len(earlier) :]
        ids, num_kept, mark_at = continued_ids(tokenizer, self.known, text, most)
        first, start = self.num_ids, self.num_chars
        if num_kept <= first:  # the last kept id is a control token of the last prompt
            first, start = num_kept - 1, mark_at
        if first < self.marks.last:
            raise OtherBeginningError
        new, begin = request.messages[num_messages:], self.num_chars - start
        added = marks_of(new, text[start:], ids[first:], tokenizer, begin=begin)
        return ContinuedPrompt(text, ids, self.marks.followed_by(added, first), num_kept)


def is_part(short: str, long: str) -> bool:
    """Whether a text is another one without one or two parts in its middle."""
    start = num_shared(short, long)
    end = long[max(start, len(long) - len(short)) :]
    stop = num_shared(short[start:][::-1], end[::-1])
    return short[start : len(short) - stop] in long[start : len(long) - stop]


def settings_of(request: ChatRequest, instructions: str | None) -> bytes:
    """A digest of all that a prompt is rendered from beside the items of the conversation."""
    fields = [instructions, *(getattr(request, name) for name in _SETTINGS)]
    return blake2b(msgspec.json.encode(fields), digest_size=16).digest()
