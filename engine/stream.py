"""TokenStream: the lease of one request. Take it with a plain `with`; neither end waits.

Whoever holds the lease holds the request's KV. Leaving the block ends the request at once,
however the block is left; a request that has finished by then is not touched.
"""

import asyncio
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from engine.request import Abort, FinishReason, Request, RequestSpec

if TYPE_CHECKING:
    from types import TracebackType

    from engine.step import TokenLogprobs


class TokenChunk(NamedTuple):
    """The tokens since the last chunk, merged; `finish` is set on the last chunk only.

    With `FinishReason.STOP` the last token is the end token. `logprobs` are one per token, if the
    request asks; `prompt_logprobs`, of the prompt's second token and on, come with the first
    chunk that has tokens.
    """

    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: "tuple[TokenLogprobs, ...]" = ()
    prompt_logprobs: "tuple[TokenLogprobs, ...]" = ()


class Lender(Protocol):
    """The engine, as a lease sees it."""

    def lend(self, stream: "TokenStream") -> Request: ...

    def take_back(self, stream: "TokenStream", reason: Abort) -> None: ...


class TokenStream:
    """Tokens as they come, then a finish reason; for one reader."""

    def __init__(self, spec: RequestSpec, lender: Lender) -> None:
        self.spec = spec
        self.request: Request  # from __enter__ on
        self._lender = lender
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._tells_prompt = spec.prompt_logprobs is not None
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None  # while it waits

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
        if not self._has_news:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._has_news = False
        tokens, self._tokens = tuple(self._tokens), []
        if self.request.error is not None:
            if not tokens:
                raise self.request.error
            self._has_news = True
        if self._logprobs or self._tells_prompt:
            return self._with_logprobs(tokens)
        return TokenChunk(tokens, self.request.finish)

    def _with_logprobs(self, tokens: tuple[int, ...]) -> TokenChunk:
        logprobs, self._logprobs = tuple(self._logprobs), []
        prompt: tuple[TokenLogprobs, ...] = ()
        if self._tells_prompt and tokens:
            prompt, self._tells_prompt = tuple(self.request.prompt_logprobs), False
        return TokenChunk(tokens, self.request.finish, logprobs, prompt)

    def push(self, token: int, logprobs: "TokenLogprobs | None" = None) -> None:
        """The engine delivers a token."""
        self._tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self.wake()

    def wake(self) -> None:
        """The engine says that there is news: a token, or the end."""
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
