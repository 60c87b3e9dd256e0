"""Intake: a bound on the event loop's time for requests that do not generate yet.

The loop that hands tokens to streams also receives, decodes and rejects requests. A client that
sends bodies as fast as they are read, or requests that are rejected, could take all of its time.
So while the engine generates, these parts of requests together get at most `SHARE` of the loop's
time, or `BUSY_SHARE` if the loop is nearly saturated, so that tokens come first. In each cycle of
the loop at most one request continues. The others wait in a queue for each client, in order of
arrival, and clients alternate. A client is a network address. Without running requests there is no
bound.

Time that was used beyond the share is repaid at the rate of the share. All clients together wait
for at most `MAX_DEBT_SECONDS` of it, so that one request that held the loop keeps others waiting
for half a second at most; the client that used it waits for up to `MAX_CLIENT_DEBT_SECONDS`. A
response that its client did not wait for is debt of this client, too, since its prompt was computed
in vain: a client that leaves more than `SHARE / ABANDONED_SECONDS` times a second waits.

Connections that are set up are metered likewise, with a share of their own.

A part is measured whenever the request's task runs. A request is no longer measured once the engine
has it, and never waits after its body has arrived.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Message, Receive

    from engine.ports import Clock
    from gateway.observe.request_log import RequestRecord

SHARE = 0.2  # of the loop's time, while the engine generates
BUSY_SHARE = 0.1  # the same while the loop is busy
MAX_CREDIT_SECONDS = 0.002  # of unused time that may be used at once
MAX_DEBT_SECONDS = 0.05  # of all clients together
MAX_CLIENT_DEBT_SECONDS = 1.0
ABANDONED_SECONDS = 0.02  # that a client owes for a response that it did not wait for
MAX_DEBTORS = 4096  # clients whose debt is remembered
RECHECK_SECONDS = 0.05  # generation may end while requests wait


@dataclass(slots=True, eq=False)
class Intake:
    """Meters what requests take of the loop's time, and lets them wait."""

    clock: "Clock"
    is_generating: Callable[[], bool]
    is_busy: Callable[[], bool] = lambda: False
    share: float = SHARE
    busy_share: float = BUSY_SHARE
    _credit: float = MAX_CREDIT_SECONDS  # seconds; negative if more was used
    _credited_at: float = 0.0
    _debts: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # and when
    _waiting: OrderedDict[str, deque[asyncio.Future[None]]] = field(default_factory=OrderedDict)
    _timer: asyncio.Handle | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their part of the loop's time."""
        return sum(len(queue) for queue in self._waiting.values())

    def charge(self, seconds: float, client: str = "") -> None:
        """A request of this client has taken so much of the loop's time."""
        self._refill()
        self._credit = max(self._credit - seconds, -MAX_DEBT_SECONDS)
        self._owe(seconds, client)

    def abandoned(self, client: str) -> None:
        """A client left before it had the response that the engine worked on: only that client
        waits for it."""
        self._refill()
        self._owe(ABANDONED_SECONDS, client)

    def _owe(self, seconds: float, client: str) -> None:
        debt = min(self._debt_of(client) + seconds, MAX_CLIENT_DEBT_SECONDS)
        self._debts.pop(client, None)
        self._debts[client] = (debt, self._credited_at)
        if len(self._debts) > MAX_DEBTORS:
            self._debts.popitem(last=False)

    async def enter(self, client: str) -> None:
        """Wait until a request of this client may take time of the loop."""
        if not self._waiting and self._may_continue() and not self._owes(client):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(future)
        self._schedule()
        await future

    def gated(self, receive: "Receive", client: str) -> "Receive":
        """`receive`, which waits as `enter` does until the body has arrived."""
        is_whole = False

        async def receive_in_order() -> "Message":
            nonlocal is_whole
            if not is_whole:
                await self.enter(client)
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)
            return message

        return receive_in_order

    @coroutine
    def metered(
        self, work: Awaitable[object], record: "RequestRecord | None", client: str = ""
    ) -> Generator[Any, Any, None]:
        """Await `work`, and charge the time that it takes until the engine has the request of
        `record`."""
        running = work.__await__()
        resume = partial(next, running)
        try:
            while True:
                awaited = self._charged(resume, client)
                try:
                    yield awaited
                except BaseException as error:  # of whatever the task awaits, or a cancellation
                    resume = partial(running.throw, error)
                else:
                    if record is not None and record.num_running:
                        break
                    resume = partial(next, running)
        except StopIteration:
            return
        yield from running

    def _charged(self, resume: Callable[[], Any], client: str) -> Any:
        """Resume a coroutine; the future that it awaits next."""
        started = self.clock()
        try:
            return resume()
        finally:
            self.charge(self.clock() - started, client)

    @property
    def _share(self) -> float:
        return self.busy_share if self.is_busy() else self.share

    def _refill(self) -> None:
        now = self.clock()
        earned = (now - self._credited_at) * self._share
        self._credit = min(MAX_CREDIT_SECONDS, self._credit + earned)
        self._credited_at = now

    def _may_continue(self) -> bool:
        if not self.is_generating():
            return True
        self._refill()
        return self._credit > 0

    def _debt_of(self, client: str) -> float:
        debt, at = self._debts.get(client, (0.0, 0.0))
        return max(0.0, debt - (self._credited_at - at) * self._share)

    def _owes(self, client: str) -> bool:
        return self.is_generating() and self._debt_of(client) > MAX_CREDIT_SECONDS

    def _schedule(self) -> None:
        """Let the next request continue in the next cycle of the loop, or once there is credit."""
        if self._timer is not None or not self._waiting:
            return
        loop = asyncio.get_running_loop()
        if not self._may_continue():
            seconds = min(-self._credit / self._share, RECHECK_SECONDS)
            self._timer = loop.call_later(seconds, self._continue_one)
        elif all(map(self._owes, self._waiting)):
            self._timer = loop.call_later(RECHECK_SECONDS, self._continue_one)
        else:
            self._timer = loop.call_soon(self._continue_one)

    def _continue_one(self) -> None:
        """Let the next client's first request continue, if there is credit."""
        self._timer = None
        while self._may_continue():
            client = next((each for each in self._waiting if not self._owes(each)), None)
            if client is None:
                break
            queue = self._waiting.pop(client)
            future = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the other clients
            if not future.done():  # its task was not cancelled
                future.set_result(None)
                break
        self._schedule()
