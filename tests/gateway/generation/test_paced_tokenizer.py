import asyncio
import threading
from collections.abc import Iterator

import pytest

from gateway.errors import PromptTooLong
from gateway.generation.prompt import SHARE, SLICE_CHARS, PacedTokenizer, tokenize_prompts
from tests.gateway.generation.test_prompt import Letters

SECONDS = 0.01  # of CPU time for each piece, as measured by the fake clock
TEXT = "abcdefghij" * 1000
REST = 1.0 / SHARE - 1.0  # seconds for each second of CPU time


class Pieces(Letters):
    """`Letters` in pieces of 1,000 characters; counts those that were encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.num_encoded = 0

    def encode_pieces(self, text: str, *, add_special_tokens: bool) -> Iterator[list[int]]:
        for start in range(0, len(text), 1000):
            self.num_encoded += 1
            yield self.encode(text[start : start + 1000], add_special_tokens=False)


class BlockedPieces(Pieces):
    """`Pieces` that blocks in its second piece until it may continue."""

    def __init__(self) -> None:
        super().__init__()
        self.is_blocked, self.may_continue, self.has_ended = (threading.Event() for _ in range(3))

    def encode_pieces(self, text: str, *, add_special_tokens: bool) -> Iterator[list[int]]:
        try:
            for piece in super().encode_pieces(text, add_special_tokens=add_special_tokens):
                if self.num_encoded == 2:
                    self.is_blocked.set()
                    self.may_continue.wait()
                yield piece
        finally:
            self.has_ended.set()


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rests taken. Each reading of the thread's clock is `SECONDS` after the one before."""
    found: list[float] = []
    times = iter(range(1_000_000))
    name = "gateway.generation.prompt.time"
    monkeypatch.setattr(f"{name}.thread_time", lambda: next(times) * SECONDS)
    monkeypatch.setattr(f"{name}.sleep", found.append)
    return found


async def test_a_thread_rests_after_each_piece_while_requests_run(rests: list[float]) -> None:
    tokenizer = PacedTokenizer(Pieces(), lambda: True)
    assert (await tokenize_prompts(tokenizer, [TEXT])).prompts == [tuple(map(ord, TEXT))]
    assert rests == pytest.approx([REST * SECONDS] * 10)


async def test_two_threads_rest_so_long_that_they_take_a_fifth_of_a_core_together(
    rests: list[float],
) -> None:
    tokenizer = PacedTokenizer(Pieces(), lambda: True)
    other = tokenizer.encode_pieces(TEXT, add_special_tokens=False)
    await asyncio.to_thread(next, other)  # the first piece of a text
    await tokenize_prompts(tokenizer, [TEXT])
    assert rests == pytest.approx([REST * SECONDS] + [(2 / SHARE - 1) * SECONDS] * 10)
    del other  # ends it
    await tokenize_prompts(tokenizer, [TEXT])
    assert rests[11:] == pytest.approx([REST * SECONDS] * 10)


async def test_without_requests_nothing_rests(rests: list[float]) -> None:
    await tokenize_prompts(PacedTokenizer(Pieces(), lambda: False), [TEXT])
    assert not rests


async def test_the_event_loop_never_rests(rests: list[float]) -> None:
    tokenizer = PacedTokenizer(Pieces(), lambda: True)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == [*map(ord, TEXT)]
    assert not rests
    await asyncio.to_thread(tokenizer.encode, TEXT, add_special_tokens=False)
    assert rests


async def test_a_text_is_tokenized_only_until_it_exceeds_the_context() -> None:
    pieces = Pieces()
    with pytest.raises(PromptTooLong, match="context length is 2500 tokens") as error:
        await tokenize_prompts(PacedTokenizer(pieces, lambda: True), [TEXT], most=2500)
    assert (error.value.param, pieces.num_encoded) == ("prompt", 4)
    assert (await tokenize_prompts(pieces, [TEXT], most=10_000)).prompts == [tuple(map(ord, TEXT))]


class Newlines(Pieces):
    """Has a token for each 64 newlines, and can divide no text."""

    longest = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.longest = max(self.longest, len(text))
        return [10] * -(-len(text) // 64)

    def encode_pieces(self, text: str, *, add_special_tokens: bool) -> Iterator[list[int]]:
        yield self.encode(text, add_special_tokens=add_special_tokens)


async def test_a_text_without_a_place_to_cut_is_refused_by_its_slices() -> None:
    tokenizer = Newlines()
    with pytest.raises(PromptTooLong, match="at least 2"):
        await tokenize_prompts(tokenizer, ["\n" * 8_000_000], most=2_500)
    assert tokenizer.longest == SLICE_CHARS
    fits = "\n" * (64 * 2_000)
    assert len((await tokenize_prompts(tokenizer, [fits], most=2_500)).prompts[0]) == 2_000


async def test_a_text_is_tokenized_no_further_once_its_request_is_cancelled() -> None:
    pieces = BlockedPieces()
    tokenizer = PacedTokenizer(pieces, lambda: False)
    cancelled = asyncio.create_task(tokenize_prompts(tokenizer, [TEXT]))
    await asyncio.to_thread(pieces.is_blocked.wait)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    pieces.may_continue.set()
    await asyncio.to_thread(pieces.has_ended.wait)
    assert pieces.num_encoded == 2
    assert (await tokenize_prompts(tokenizer, [TEXT])).prompts == [tuple(map(ord, TEXT))]
