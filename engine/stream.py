"""TokenStream: the lease of one request. Take it with a plain `with`; neither end waits.

Whoever holds the lease holds the request's KV. Leaving the block ends the request at once,
however the block is left; a request that has finished by then is not touched.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from engine.request import Abort, Ask, FinishReason, Request

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The tokens since the last chunk, merged; `finish` is set on the last chunk only.

    With `FinishReason.STOP` the last token is the end token.
    """

    tokens: tuple[int, ...]
    finish: FinishReason | None


class Lender(Protocol):
    """The engine, as a lease sees it."""

    def lend(self, stream: "TokenStream") -> Request: ...

    def take_back(self, stream: "TokenStream", reason: Abort) -> None: ...


class TokenStream:
    """Tokens as they come, then a finish reason; for one reader."""

    def __init__(self, ask: Ask, lender: Lender) -> None:
        self.ask = ask
        self.request: Request  # from __enter__ on
        self._lender = lender
        self._tokens: list[int] = []
        self._news = asyncio.Event()

    def __enter__(self) -> Self:
        """Join the queue; raises `ContextTooLong`, `Overloaded` or `Unavailable`."""
        self.request = self._lender.lend(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        self.close(Abort.CLIENT_GONE)

    def close(self, reason: Abort) -> None:
        """End the request if it still lives, and say why."""
        self._lender.take_back(self, reason)

    async def next(self) -> TokenChunk:
        """Wait for news; all tokens since the last call.

        Raises the request's `RequestFailed` or `Unavailable` if it was lost. After the last
        chunk, or after `close`, there is nothing to wait for and calling this is a bug.
        """
        await self._news.wait()
        self._news.clear()
        tokens, self._tokens = tuple(self._tokens), []
        if self.request.error is not None and not tokens:
            raise self.request.error
        if self.request.error is not None:
            self._news.set()
        return TokenChunk(tokens, self.request.finish)

    def push(self, token: int) -> None:
        """The engine delivers a token."""
        self._tokens.append(token)
        self._news.set()

    def wake(self) -> None:
        """The engine says that the request has ended."""
        self._news.set()
