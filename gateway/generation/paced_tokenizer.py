"""PacedTokenizer: threads that tokenize rest while requests are computed, and stop when the client
of their request has disconnected.

These threads have the same priority as the event loop. A thread of lower priority would hold up
the loop, because the interpreter's lock is handed over: the loop's thread waits until the other one
is scheduled and has taken it.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from gateway.generation.threads import check_cancelled, exempt
from gateway.ports import EncodesInPieces, EncodesPairs

if TYPE_CHECKING:
    from gateway.ports import TokenDecoder, Tokenizer

WORK_SECONDS = 0.002  # CPU time after which a thread rests
SHARE = 0.2  # the share of a core for all threads that tokenize together


class PacedTokenizer:
    """A `Tokenizer` whose threads take at most a fifth of a core together while
    `is_generating()`."""

    def __init__(self, tokenizer: "Tokenizer", is_generating: Callable[[], bool]) -> None:
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

    def decoder(self) -> "TokenDecoder":
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
    tokenizer: "Tokenizer", text: str, *, add_special_tokens: bool
) -> Iterator[list[int]]:
    """The ids of a text in consecutive lists: one list if the tokenizer cannot divide texts."""
    if isinstance(tokenizer, EncodesInPieces):
        return tokenizer.encode_pieces(text, add_special_tokens=add_special_tokens)
    return iter([tokenizer.encode(text, add_special_tokens=add_special_tokens)])


def token_ends(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[int]:
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
