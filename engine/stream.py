"""TokenStream: the output of one request, opened with a plain `with`, which never waits.

The request lives as long as the `with` block: leaving the block, in whichever way, cancels the
request at once and frees its KV, unless it has finished by then. `LiveStreams` are those of an
engine, and `DeadlineTimer` ends those whose deadline passes.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from engine.control.scheduler import IterationScheduler
from engine.errors import EngineError
from engine.iteration import Delivery
from engine.ports import Clock
from engine.request import ENDS_AT_ONCE, Abort, FinishReason, Request, RequestSpec
from engine.step import RequestId, TokenLogprobs


class TokenChunk(NamedTuple):
    """The tokens since the last chunk; `finish` is set on the last chunk only.

    With `FinishReason.STOP` the last token is the end token. `logprobs` has one item per token if
    the request has `logprobs`. `prompt_logprobs`, from the prompt's second token on, are part of
    the first chunk with tokens.
    """

    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def split(self) -> "Iterator[TokenChunk]":
        """The same as chunks of one token."""
        last = len(self.tokens) - 1
        for i, token in enumerate(self.tokens):
            finish = self.finish if i == last else None
            prompt_logprobs = () if i else self.prompt_logprobs
            yield TokenChunk((token,), finish, self.logprobs[i : i + 1], prompt_logprobs)


Write = tuple[Callable[[bytes], object], bytes]  # must not raise
# Takes tokens, keeps neither list, and adds what is to be written. False: not now
Relay = Callable[[list[int], list[Write]], bool]


class StreamOwner(Protocol):
    """The part of the engine that a stream uses."""

    def open_stream(self, stream: "TokenStream") -> Request: ...

    def close_stream(self, stream: "TokenStream", reason: Abort) -> None: ...


class TokenStream:
    """Tokens as they are produced, then a finish reason; for one reader."""

    __slots__ = (
        "_has_update", "_logprobs", "_owes_prompt_logprobs", "_reader", "_relay", "_tokens",
        "owner", "prefill_seconds", "reports_progress", "request", "spec",
    )  # fmt: skip

    def __init__(
        self, spec: RequestSpec, owner: StreamOwner, *, reports_progress: bool = False
    ) -> None:
        """With `reports_progress` each iteration that computes a part of the prompt is an update
        without tokens."""
        self.spec = spec
        self.reports_progress = reports_progress
        self.prefill_seconds = 0.0  # seconds of the prompt so far, at the last such update
        self.request: Request  # from __enter__ on
        self.owner = owner  # another one after `Engine.hand_over`
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._owes_prompt_logprobs = spec.prompt_logprobs is not None
        self._has_update = False
        self._reader: asyncio.Future[None] | None = None  # while the reader waits
        self._relay: Relay | None = None  # meanwhile

    def open(self) -> Self:
        """Add the request to the queue.

        Raises `InvalidRequest`, `Overloaded` or `Unavailable`.
        """
        self.request = self.owner.open_stream(self)
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(Abort.CLIENT_GONE)

    def close(self, reason: Abort) -> None:
        """End the request with this reason if it is still live."""
        self.owner.close_stream(self, reason)

    async def next(self, relay: Relay | None = None) -> TokenChunk:
        """Wait for an update, and return all tokens since the last call. While this waits, tokens
        go to `relay` as long as it takes them, which spares waking a task for each; it gets no
        tokens with log-probabilities, and not the last one.

        Raises the request's error, a `RequestFailed` or `Unavailable`, after its last tokens.
        Must not be called after the last chunk or after `close`: it would wait for ever.
        """
        if not self._has_update:
            self._relay = relay if self.spec.logprobs is None else None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._relay = None  # it refers to the reader
        self._has_update = False
        tokens, self._tokens = tuple(self._tokens), []
        if self.request.error is not None:
            if not tokens:
                raise self.request.error
            self._has_update = True
        if self._logprobs or self._owes_prompt_logprobs:
            return self._with_logprobs(tokens)
        return TokenChunk(tokens, self.request.finish)

    def _with_logprobs(self, tokens: tuple[int, ...]) -> TokenChunk:
        logprobs, self._logprobs = tuple(self._logprobs), []
        prompt: tuple[TokenLogprobs, ...] = ()
        if self._owes_prompt_logprobs and tokens:
            prompt, self._owes_prompt_logprobs = tuple(self.request.prompt_logprobs), False
        return TokenChunk(tokens, self.request.finish, logprobs, prompt)

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Append a token that the engine delivers, and wake the reader. With a relay it sleeps on,
        and it is returned whether `offer` has to be called."""
        self._tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if self._relay is None:
            self.wake()
        is_known, self._has_update = self._has_update, True
        return not is_known

    def offer(self, writes: list[Write]) -> None:
        """Hand the new tokens to the relay; if it does not take them or fails, wake the reader."""
        relay = self._relay
        if relay is None:
            return
        try:
            if relay(self._tokens, writes):
                self._tokens.clear()
                self._has_update = False
            else:
                self.wake()
        except Exception as error:
            if self._reader is not None and not self._reader.done():
                self._reader.set_exception(error)

    def progressed(self, now: float) -> None:
        """A part of the prompt has been computed."""
        admitted_at = self.request.times.admitted_at
        self.prefill_seconds = 0.0 if admitted_at is None else now - admitted_at
        self.wake()

    def wake(self) -> None:
        """Wake the reader: there is a token, or the request has ended."""
        self._has_update, self._relay = True, None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def offer_all(streams: Iterable[TokenStream]) -> None:
    """Hand new tokens to the relays of these streams. What they write follows in a row, for which a
    write takes less time: its code stays in the caches, and a reader on this machine awake."""
    writes: list[Write] = []
    for stream in streams:
        stream.offer(writes)
    for write, data in writes:
        write(data)


def close_streams(streams: Iterable[TokenStream], reason: Abort) -> None:
    """End the requests of these streams that are still live: `ENDS_AT_ONCE` now, the others in the
    next turns of the event loop, which thousands of ends would hold for 100 ms."""
    live = [stream for stream in streams if not stream.request.state.is_terminal]
    for stream in live[:ENDS_AT_ONCE]:
        stream.close(reason)
    if later := live[ENDS_AT_ONCE:]:
        asyncio.get_running_loop().call_soon(close_streams, later, reason)


class Wakeup:
    """An `asyncio.Event` that only the engine's loop waits for, in a third of the time."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class LiveStreams:
    """Delivers tokens, ends and progress to the streams of live requests."""

    def __init__(self) -> None:
        self._streams: dict[RequestId, TokenStream] = {}
        self._reporting: dict[RequestId, TokenStream] = {}  # until the prompt is computed

    def add(self, stream: TokenStream, request: Request) -> None:
        """The request is live from now on."""
        self._streams[request.request_id] = stream
        if stream.reports_progress and not request.output:
            self._reporting[request.request_id] = stream

    def remove(self, request: Request) -> TokenStream | None:
        """The stream of a request, which is not live here any more; None if it was not."""
        self._reporting.pop(request.request_id, None)
        return self._streams.pop(request.request_id, None)

    def requests(self, which: Callable[[RequestSpec], bool]) -> list[Request]:
        """The live requests of which this is true."""
        return [stream.request for stream in self._streams.values() if which(stream.spec)]

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Push tokens, and forget the streams of requests that have ended."""
        finished: list[Request] = []
        offered: list[TokenStream] = []
        for request, token, logprobs in deliveries:
            if token is None:
                self.wake([request])
                continue
            stream = self._streams[request.request_id]
            if stream.push(token, logprobs):
                offered.append(stream)
            if request.finish is not None:
                finished.append(request)
        self.wake(finished)
        if offered:  # written once the next iteration is on its way
            asyncio.get_running_loop().call_soon(offer_all, offered)

    def report_progress(self, requests: Sequence[Request], now: float) -> None:
        """An iteration of these requests was committed."""
        if not self._reporting:
            return
        for request in requests:
            stream = self._reporting.get(request.request_id)
            if stream is not None and not request.output:
                stream.progressed(now)
        live = self._streams.keys()
        ended = [i for i, each in self._reporting.items() if i not in live or each.request.output]
        for request_id in ended:
            del self._reporting[request_id]

    def end(
        self,
        requests: Sequence[Request],
        scheduler: IterationScheduler,
        error: EngineError,
        now: float,
    ) -> None:
        """End live requests of this scheduler with an error, which their readers get."""
        for request in requests:
            request.error = error
            scheduler.cancel(request, Abort.EXPLICIT, now)
        self.wake(requests)

    def wake(self, ended: Iterable[Request]) -> None:
        """Wake the readers of requests that have ended."""
        for request in ended:
            stream = self._streams.pop(request.request_id, None)
            if stream is not None:
                stream.wake()


class DeadlineTimer:
    """Expires requests when their deadline passes, also while no iteration returns."""

    def __init__(self, scheduler: IterationScheduler, clock: Clock, streams: LiveStreams) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._streams = streams
        self._timer: asyncio.TimerHandle | None = None  # for the earliest deadline

    def set(self) -> None:
        """The earliest deadline may be another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._scheduler.pool.next_deadline
        if deadline is not None:
            delay = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._ring)

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        if self._scheduler.pool.next_deadline is not None:
            self._streams.wake(self._scheduler.expire(self._clock()))

    def _ring(self) -> None:
        self.expire()
        self.set()
