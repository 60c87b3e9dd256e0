"""Intake: a bound on the event loop's time for requests that do not generate yet.

The loop that hands tokens to streams also receives, decodes and rejects requests. A client that
sends bodies as fast as they are read, or requests that are rejected, could take all of its time.
So while the engine generates, these parts of requests together get at most `SHARE` of the loop's
time, or `BUSY_SHARE` if the loop is nearly saturated, so that tokens come first. In each cycle of
the loop at most one request continues. The others wait in a queue for each client, in order of
arrival, and clients alternate. A client is a network address, or the network of an IPv6 one.
Without running requests there is no bound.

A client owes the time that it used, and waits while it owes more than `MAX_CREDIT_SECONDS`; all who
owe repay at equal rates, together at that of the share (`Debts`). Others wait for no more than
`MAX_SHARED_SECONDS` of one client's debt, and of all clients' for `MAX_DEBT_SECONDS` together:
a request that held the loop keeps requests of other addresses waiting for a few milliseconds, and
many addresses that begin at once cannot take the loop. A response that its client did not wait for
is debt of this client, too, since its prompt was computed in vain: a client that leaves more than
`SHARE / ABANDONED_SECONDS` times a second waits. All streams wait for a piece of work that cannot
be cut, such as decoding a body: what exceeds `PIECE_SECONDS` is charged several-fold, so that one
client causes few of them in a second.

Connections that are set up are metered likewise, with a share of their own, and so are probes and
cancellations, which wait for their own client's only.

A part is measured whenever the request's task runs. A request is no longer measured once the engine
has it. After its body has arrived it waits only if it needs a thread
(`gateway.generation.threads`), or if it adds many requests to the engine beside those of others.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from types import coroutine
from typing import Any

from starlette.types import Message, Receive

from engine.ports import Clock
from gateway.observe.request_log import RequestRecord

SHARE = 0.2  # share of the loop's time, while the engine generates
BUSY_SHARE = 0.1  # the same while the loop is busy
MAX_CREDIT_SECONDS = 0.002  # unused time that may be used at once
MAX_DEBT_SECONDS = 0.05  # the debt of all clients together
MAX_SHARED_SECONDS = 0.001  # others wait for so much of one client's debt
MAX_CLIENT_DEBT_SECONDS = 1.0
PIECE_SECONDS = 0.005  # one piece of work may hold the loop so long
LONG_PIECE_FACTOR = 5.0  # what exceeds that is charged so many times
ABANDONED_SECONDS = 0.02  # a client owes this for a response that it did not wait for
MIN_WAIT_SECONDS = 0.001  # a clock may not advance by the rounding of a difference
RECHECK_SECONDS = 0.05  # generation may end while requests wait
MAX_DEBTORS = 4096
_MIN_STALE = 64  # entries of the heap, before it is built anew


class Debts:
    """What each client owes of the loop's time, in seconds and at most `max_debt` of them; all
    debtors repay at equal rates.

    This is fair queueing of a resource whose use is known only afterwards: a client with a small
    debt is soon free of it, however much another one owes. `_paid` is what a client would have
    repaid that has owed since the start; a debt is repaid when `_paid` reaches its mark.
    """

    def __init__(self, max_debt: float) -> None:
        self._max_debt = max_debt
        self._paid = 0.0
        self._marks: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # the marks, and some that are no longer valid

    def __len__(self) -> int:
        """Clients that owe."""
        return len(self._marks)

    def of(self, client: str) -> float:
        return self._marks.get(client, self._paid) - self._paid

    def add(self, client: str, seconds: float) -> None:
        """The client owes so much more. Beyond `MAX_DEBTORS` the smallest debt is forgotten."""
        debt = min(self.of(client) + seconds, self._max_debt)
        if debt <= 0.0:
            return
        mark = self._marks[client] = self._paid + debt
        heappush(self._heap, (mark, client))
        if len(self._marks) > MAX_DEBTORS:
            del self._marks[self._next_free()[1]]
        if len(self._heap) > 2 * len(self._marks) + _MIN_STALE:
            self._heap = [(mark, client) for client, mark in self._marks.items()]
            heapify(self._heap)

    def repay(self, seconds: float) -> None:
        """Divide earned time equally among those who owe."""
        while self._marks:
            mark, client = self._next_free()
            rest = seconds - (mark - self._paid) * len(self._marks)
            if rest < 0.0:
                self._paid += seconds / len(self._marks)
                return
            self._paid, seconds = mark, rest
            del self._marks[client]

    def _next_free(self) -> tuple[float, str]:
        """The mark and the client of the smallest debt."""
        heap = self._heap
        while self._marks.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0]


@dataclass(slots=True, eq=False)
class Intake:
    """Meters what requests take of the loop's time, and lets them wait.

    `max_debt` is what clients wait for together; with 0 each waits for its own debt only. What a
    request takes is measured in CPU time: it does not owe what others take meanwhile.
    """

    clock: Clock
    cpu_clock: Clock  # the calling thread's CPU time
    is_generating: Callable[[], bool]
    is_busy: Callable[[], bool] = lambda: False
    share: float = SHARE
    busy_share: float = BUSY_SHARE
    max_debt: float = MAX_DEBT_SECONDS
    _credit: float = MAX_CREDIT_SECONDS  # seconds; negative if more was used
    _credited_at: float = 0.0
    _debts: Debts = field(default_factory=lambda: Debts(MAX_CLIENT_DEBT_SECONDS))
    _waiting: OrderedDict[str, deque[asyncio.Future[None]]] = field(default_factory=OrderedDict)
    _timer: asyncio.Handle | None = None
    _is_next_due: bool = False  # the timer ends in the next cycle of the loop

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their part of the loop's time."""
        return sum(len(queue) for queue in self._waiting.values())

    def charge(self, seconds: float, client: str = "") -> None:
        """A request of this client has taken so much of the loop's time."""
        self._refill()
        before = min(self._debts.of(client), MAX_SHARED_SECONDS)
        self._debts.add(client, seconds)
        shared = min(self._debts.of(client), MAX_SHARED_SECONDS) - before
        self._credit = max(self._credit - shared, -self.max_debt)

    def charge_piece(self, seconds: float, client: str) -> None:
        """The same for work in one piece, which nothing could interrupt."""
        more = (LONG_PIECE_FACTOR - 1.0) * max(0.0, seconds - PIECE_SECONDS)
        self.charge(seconds + more, client)

    def abandoned(self, client: str) -> None:
        """A client left before it had the response that the engine worked on: only that client
        waits for it."""
        self._refill()
        self._debts.add(client, ABANDONED_SECONDS)

    async def enter(self, client: str) -> None:
        """Wait until a request of this client may take time of the loop."""
        is_first = not self._is_next_due and client not in self._waiting
        if is_first and self._may_continue(client):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(future)
        self._schedule()
        await future

    async def next_turn(self, client: str) -> None:
        """Let others run, then wait as `enter` does: for one of many messages of a connection."""
        await asyncio.sleep(0)
        await self.enter(client)

    def gated(self, receive: Receive, client: str) -> Receive:
        """`receive`, which waits as `enter` does until the body has arrived."""
        is_whole = False

        async def receive_in_order() -> Message:
            nonlocal is_whole
            if not is_whole:
                await self.enter(client)
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)
            return message

        return receive_in_order

    @coroutine
    def metered(
        self, work: Awaitable[object], record: RequestRecord | None, client: str = ""
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
                # An error of whatever the task awaits, or a cancellation
                except BaseException as error:
                    resume = partial(running.throw, error)
                else:
                    if record is not None and record.num_running and not record.is_starting:
                        break
                    resume = partial(next, running)
        except StopIteration:
            return
        finally:
            del resume  # an error that it throws refers to this frame
        yield from running

    def _charged(self, resume: Callable[[], Any], client: str) -> Any:
        """Resume a coroutine; the future that it awaits next."""
        started = self.cpu_clock()
        try:
            return resume()
        finally:
            self.charge_piece(self.cpu_clock() - started, client)

    @property
    def _share(self) -> float:
        return self.busy_share if self.is_busy() else self.share

    def _refill(self) -> None:
        now = self.clock()
        earned = (now - self._credited_at) * self._share
        self._credit = min(MAX_CREDIT_SECONDS, self._credit + earned)
        self._debts.repay(earned)
        self._credited_at = now

    def _wait_seconds(self, *clients: str) -> float:
        """How long until a request of one of these clients may continue, 0 if one may now."""
        if not self.is_generating():
            return 0.0
        self._refill()
        own = min(map(self._debts.of, clients)) - MAX_CREDIT_SECONDS
        return max(0.0, own * len(self._debts), -self._credit) / self._share

    def _schedule(self) -> None:
        """Let the next request continue in the next cycle of the loop, or once it may."""
        if self._is_next_due or not self._waiting:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        seconds = self._wait_seconds(*self._waiting)
        self._is_next_due = seconds <= 0.0
        if self._is_next_due:
            self._timer = loop.call_soon(self._continue_one)
        else:
            seconds = min(max(seconds, MIN_WAIT_SECONDS), RECHECK_SECONDS)
            self._timer = loop.call_later(seconds, self._continue_one)

    def _continue_one(self) -> None:
        """Let the next client's first request continue, if one may."""
        self._timer, self._is_next_due = None, False
        while (client := next(filter(self._may_continue, self._waiting), None)) is not None:
            queue = self._waiting.pop(client)
            future = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the other clients
            if not future.done():  # its task was not cancelled
                future.set_result(None)
                break
        self._schedule()

    def _may_continue(self, client: str) -> bool:
        return self._wait_seconds(client) <= 0.0
