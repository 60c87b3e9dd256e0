"""LiveStreams: the token streams of an engine's live requests, and the timer of their deadlines."""

import asyncio
from typing import TYPE_CHECKING

from engine.request import Abort

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.control.scheduler import IterationScheduler
    from engine.errors import EngineError
    from engine.iteration import Delivery
    from engine.ports import Clock
    from engine.request import Request, RequestSpec
    from engine.step import RequestId
    from engine.stream import TokenStream


class LiveStreams:
    """Delivers tokens, ends and progress to the streams of live requests."""

    def __init__(self) -> None:
        self._streams: dict[RequestId, TokenStream] = {}
        self._reporting: dict[RequestId, TokenStream] = {}  # until the prompt is computed

    def add(self, stream: "TokenStream", request: "Request") -> None:
        """The request is live from now on."""
        self._streams[request.request_id] = stream
        if stream.reports_progress and not request.output:
            self._reporting[request.request_id] = stream

    def remove(self, request: "Request") -> "TokenStream | None":
        """The stream of a request, which is not live here any more; None if it was not."""
        self._reporting.pop(request.request_id, None)
        return self._streams.pop(request.request_id, None)

    def requests(self, which: "Callable[[RequestSpec], bool]") -> "list[Request]":
        """The live requests of which this is true."""
        return [stream.request for stream in self._streams.values() if which(stream.spec)]

    def deliver(self, deliveries: "Iterable[Delivery]") -> None:
        """Push tokens, and forget the streams of requests that have ended."""
        finished: list[Request] = []
        for request, token, logprobs in deliveries:
            if token is None:
                self.wake([request])
                continue
            self._streams[request.request_id].push(token, logprobs)
            if request.finish is not None:
                finished.append(request)
        for request in finished:
            self._streams.pop(request.request_id, None)

    def report_progress(self, requests: "Sequence[Request]", now: float) -> None:
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
        requests: "Sequence[Request]",
        scheduler: "IterationScheduler",
        error: "EngineError",
        now: float,
    ) -> None:
        """End live requests of this scheduler with an error, which their readers get."""
        for request in requests:
            request.error = error
            scheduler.cancel(request, Abort.EXPLICIT, now)
        self.wake(requests)

    def wake(self, ended: "Iterable[Request]") -> None:
        """Wake the readers of requests that have ended."""
        for request in ended:
            stream = self._streams.pop(request.request_id, None)
            if stream is not None:
                stream.wake()


class DeadlineTimer:
    """Expires requests when their deadline passes, also while no iteration returns."""

    def __init__(
        self, scheduler: "IterationScheduler", clock: "Clock", streams: LiveStreams
    ) -> None:
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
