"""Prompts to token ids, and where the messages and cache breakpoints of a conversation are in them.

Short prompts are tokenized on the event loop, long ones in a thread: one of the loop's default
executor, which the server bounds. Tokenizers release the GIL on long texts, so the loop keeps
running meanwhile. `PacedTokenizer` lets these threads rest while requests are computed, and stops
one when the client of its request has disconnected. They have the priority of the event loop: a
thread of lower priority would hold it up, because the interpreter's lock is handed over, and the
loop's thread waits until the other one is scheduled and has taken it.
"""

import asyncio
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from engine.errors import InvalidRequest
from engine.media import Media
from gateway.errors import PromptTooLong
from gateway.generation.threads import check_cancelled, exempt, run_in_thread
from gateway.ports import EncodesInPieces, EncodesPairs, StreamParser, TokenDecoder, Tokenizer
from gateway.schema.fields.sampling import MAX_BREAKPOINTS
from gateway.schema.openai.chat import Message

WORK_SECONDS = 0.002  # CPU time after which a thread rests
SHARE = 0.2  # the share of a core for all threads that tokenize together


class PacedTokenizer:
    """A `Tokenizer` whose threads take at most a fifth of a core together while
    `is_generating()`."""

    def __init__(self, tokenizer: Tokenizer, is_generating: Callable[[], bool]) -> None:
        self._tokenizer = tokenizer
        self._is_generating = is_generating
        self._thread = threading.local()  # `worked`: seconds since its last rest
        self._texts: set[object] = set()  # a mark for each text that a thread tokenizes now
        self._lengths: dict[int, int] = {}  # bytes of the ids that were seen

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        return self._tokenizer.special_ids

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self._tokenizer.special_tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def decoder(self) -> TokenDecoder:
        return self._tokenizer.decoder()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text."""
        ids: list[int] = []
        for piece in self.encode_pieces(text, add_special_tokens=add_special_tokens):
            ids += piece
        return ids

    def encode_pieces(self, text: str, *, add_special_tokens: bool) -> Iterator[list[int]]:
        """The ids in consecutive lists, with rests between them; raises as `check_cancelled`."""
        pieces = encode_pieces(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if _is_loop_thread():
            yield from pieces
            return
        mark = object()
        self._texts.add(mark)
        try:
            began = time.thread_time()
            for piece in pieces:
                check_cancelled()
                seconds = time.thread_time() - began
                exempt(seconds)
                self._rest_after(seconds)
                yield piece
                began = time.thread_time()
        finally:
            self._texts.discard(mark)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """The ids of a pair of texts; see `EncodesPairs`."""
        assert isinstance(self._tokenizer, EncodesPairs), "all tokenizers of checkpoints are"
        return self._tokenizer.encode_pair(first, second)

    def token_ends(self, ids: Sequence[int]) -> list[int]:
        """The number of bytes of a text up to the end of each of its ids."""
        lengths = self._lengths
        for token_id in set(ids) - lengths.keys():
            lengths[token_id] = len(self._tokenizer.token_bytes(token_id))
        return [*accumulate(map(lengths.__getitem__, ids))]

    def _rest_after(self, seconds: float) -> None:
        """The calling thread has worked so long; it rests longer beside another one."""
        worked = getattr(self._thread, "worked", 0.0) + seconds
        if worked >= WORK_SECONDS:
            if self._is_generating():
                time.sleep((len(self._texts) / SHARE - 1.0) * worked)
            worked = 0.0
        self._thread.worked = worked


def encode_pieces(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool
) -> Iterator[list[int]]:
    """The ids of a text in consecutive lists: one list if the tokenizer cannot divide texts."""
    if isinstance(tokenizer, EncodesInPieces):
        return tokenizer.encode_pieces(text, add_special_tokens=add_special_tokens)
    return iter([tokenizer.encode(text, add_special_tokens=add_special_tokens)])


def token_ends(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The number of bytes of a text up to the end of each of its ids."""
    if isinstance(tokenizer, PacedTokenizer):
        return tokenizer.token_ends(ids)
    return [*accumulate(map(len, map(tokenizer.token_bytes, ids)))]


def _is_loop_thread() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


Prompt = tuple[int, ...]

# What is tokenized on the loop: under 3 ms with the slowest tokenizer. Each prompt or message
# counts as this many characters more, because a part has a cost however short it is.
_MAX_CHARS_ON_LOOP = 4_096
_CHARS_PER_PART = 128
UNUSUAL_CHARS = 8  # per token: a text of so many may have no place to cut, like one of newlines
SLICE_CHARS = 16_384
IDS_PER_CUT = 32  # more than a cut through the longest token adds on both of its sides


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
    messages: Sequence[Message],
    text: str,
    ids: Sequence[int],
    tokenizer: Tokenizer,
    media: Sequence[Media] = (),
    begin: int = 0,
) -> PromptMarks:
    """The marks of a prompt with these ids, which was rendered from the messages. The text is that
    of all ids but those of `media`, which stand for images. The messages lie behind its first
    `begin` characters.

    A chat template may change a message, so its text is looked for in the prompt. What is not found
    is passed over: a breakpoint only says where other requests will probably go on.
    """
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


def _without_images(ids: Sequence[int], media: Sequence[Media]) -> Sequence[int]:
    """The ids but those that stand for images."""
    others: list[int] = []
    starts = [0, *(each.end for each in media)]
    for start, stop in zip(starts, [*(each.start for each in media), len(ids)], strict=True):
        others += ids[start:stop]
    return others if media else ids


def _with_images(num_ids: int, media: Sequence[Media]) -> int:
    """How many leading tokens so many others are, with the images before the last of them."""
    for each in media:
        if each.start >= num_ids:
            break
        num_ids += each.num_tokens
    return num_ids


def _num_bytes(text: str) -> int:
    return len(text.encode())


class TokenizedPrompts(NamedTuple):
    """Prompts as token ids, and how to parse the outputs; without a parser all is content.

    `visible_tokens` maps control tokens that the parser must see to their texts. `text` is that of
    the one prompt of a conversation, and `media` are its images. Its first `num_kept` ids are those
    of the text before it that its connection keeps.
    """

    prompts: Sequence[Prompt]
    new_parser: Callable[[], StreamParser] | None = None  # a fresh parser for each output
    visible_tokens: Mapping[int, bytes] = MappingProxyType({})
    text: str = ""
    marks: PromptMarks = NO_MARKS
    media: tuple[Media, ...] = ()
    num_kept: int = 0


async def tokenize_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int]], most: int | None = None
) -> TokenizedPrompts:
    """The ids of each prompt, in order; a prompt of ids stays as it is.

    Raises `InvalidRequest` for text that is not valid Unicode, and as `token_ids` does.
    """

    def tokenize() -> list[Prompt]:
        return [
            token_ids(tokenizer, prompt, "prompt", add_special_tokens=True, most=most)
            if isinstance(prompt, str)
            else tuple(prompt)
            for prompt in prompts
        ]

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return TokenizedPrompts(
        tokenize() if fits_on_loop(texts, len(texts)) else await run_in_thread(tokenize)
    )


async def tokenize_text(tokenizer: Tokenizer, text: str, param: str) -> Prompt:
    """The ids of a text without special tokens; `InvalidRequest` as `token_ids`."""
    tokenize = partial(token_ids, tokenizer, text, param, add_special_tokens=False)
    return tokenize() if fits_on_loop([text], 1) else await run_in_thread(tokenize)


def fits_on_loop(texts: Iterable[str | bytes | None], num_parts: int) -> bool:
    """Whether these texts are short enough to be tokenized on the event loop."""
    num_chars = sum(len(text) for text in texts if text)
    return num_chars + _CHARS_PER_PART * num_parts <= _MAX_CHARS_ON_LOOP


def token_ids(
    tokenizer: Tokenizer,
    text: str,
    param: str,
    *,
    add_special_tokens: bool,
    most: int | None = None,
) -> Prompt:
    """The ids of a text. Raises `InvalidRequest` naming `param` if it is not valid Unicode.

    A text with more than `most` ids is tokenized only until this is known: then this raises
    `PromptTooLong`.
    """
    ids: list[int] = []
    try:
        if most is not None and len(text) > UNUSUAL_CHARS * most:
            _check_slices(tokenizer, text, param, most)
        for piece in encode_pieces(tokenizer, text, add_special_tokens=add_special_tokens):
            if piece and most is not None and len(ids) > most:
                raise PromptTooLong(len(ids) + len(piece), most, param)
            ids += piece
        return tuple(ids)
    except UnicodeEncodeError as error:
        message = f"'{param}' is not valid Unicode: it has an unpaired surrogate."
        raise InvalidRequest(message, param) from error


def _check_slices(tokenizer: Tokenizer, text: str, param: str, most: int) -> None:
    """Raise `PromptTooLong` if slices of the text have far more than `most` ids together.

    Some texts have no place at which their ids allow a cut, such as millions of newlines, and take
    a minute in one piece. A cut anywhere changes the count by a few ids only.
    """
    min_ids = 0
    for start in range(0, len(text), SLICE_CHARS):
        ids = tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
        min_ids += len(ids) - IDS_PER_CUT
        if min_ids > most:
            raise PromptTooLong(min_ids, most, param)
