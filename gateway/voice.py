"""Voice: one choice of a response, from its tokens to the pieces of its message.

tokens ──decoder──▶ bytes ──TextStream──▶ text ──parser──▶ pieces
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.request import Abort, FinishReason
from gateway.ports import CallBegin, Piece, StreamParser
from gateway.schema.frames import End, Said
from gateway.text import TextStream

if TYPE_CHECKING:
    from engine.stream import TokenStream
    from gateway.ports import TokenDecoder

_CALLED = "tool_calls"


class Voice:
    """One choice. `end` is None until `next` has returned the last of its message.

    Where text can be cut or counted (stop strings, a parser) tokens are read one by one, so that
    nothing depends on how they were gathered in chunks.
    """

    def __init__(
        self,
        index: int,
        tokens: "TokenStream",
        decoder: "TokenDecoder",
        stops: Sequence[str] = (),
        parser: StreamParser | None = None,
    ) -> None:
        self.index = index
        self.end: End | None = None
        self.num_tokens = 0
        self.num_reasoning = 0  # of the tokens
        self._tokens = tokens
        self._text = TextStream(decoder, stops)
        self._parser = parser
        self._has_calls = False
        self._is_plain = not stops and parser is None

    async def next(self) -> Said:
        """Wait for news; what it adds to the message, which may be nothing.

        Raises `RequestFailed` or `Unavailable` if the request was lost.
        """
        chunk = await self._tokens.next()
        if self._is_plain and chunk.finish is None:
            self.num_tokens += len(chunk.tokens)
            text = self._text.feed(chunk.tokens)
            return (text,) if text else ()
        return self._speak(chunk.tokens, chunk.finish)

    def _speak(self, tokens: tuple[int, ...], finish: FinishReason | None) -> Said:
        shown = tokens[:-1] if finish is FinishReason.STOP else tokens
        pieces: list[Piece] = []
        for token in shown:
            self._read(token, pieces)
            if self._text.is_stopped or self._is_complete:
                return self._finish(pieces, FinishReason.STOP)
        self.num_tokens += len(tokens) - len(shown)
        if finish is None:
            self._note_calls(pieces)
            return pieces
        self._parse(self._text.finish(), pieces)
        return self._finish(pieces, finish)

    def _read(self, token: int, pieces: list[Piece]) -> None:
        """One token, counted as reasoning if it was, or led there."""
        self.num_tokens += 1
        was_reasoning = self._is_reasoning
        self._parse(self._text.feed((token,)), pieces)
        self.num_reasoning += was_reasoning or self._is_reasoning

    def _parse(self, text: str, pieces: list[Piece]) -> None:
        if self._parser is None:
            pieces += (text,) if text else ()
        else:
            pieces += self._parser.feed(text) if text else ()

    def _finish(self, pieces: list[Piece], finish: FinishReason) -> Said:
        if self._text.is_stopped or self._is_complete:
            self._tokens.close(Abort.STOP_STRING)
            finish = FinishReason.STOP
        if self._parser is not None:
            pieces += self._parser.finish()
        self._note_calls(pieces)
        has_called = self._has_calls and finish is FinishReason.STOP
        self.end = End(_CALLED if has_called else finish.value, self._text.stopped)
        return pieces

    def _note_calls(self, pieces: Sequence[Piece]) -> None:
        if self._parser is not None and any(isinstance(piece, CallBegin) for piece in pieces):
            self._has_calls = True

    @property
    def _is_complete(self) -> bool:
        return self._parser is not None and self._parser.is_complete

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    @property
    def num_cached(self) -> int:
        """Tokens of its prompt that were found in the prefix cache."""
        return self._tokens.request.num_cached

    def close(self, reason: Abort) -> None:
        """End it early."""
        self._tokens.close(reason)
