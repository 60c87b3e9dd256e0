import asyncio
import gc
import itertools
import threading
from collections import defaultdict

import pytest

from gateway.access.intake import LONG_PIECE_FACTOR, PIECE_SECONDS, Intake
from gateway.generation.threads import (
    MAX_BYTES_ON_LOOP,
    check_cancelled,
    exempt,
    read_body_with,
    run_in_thread,
    thread_meter,
)
from gateway.web.middleware import ThreadWork

LONG = bytes(MAX_BYTES_ON_LOOP + 1)


class Clients:
    """Clients whose work in threads goes through one intake, whose clock stands still."""

    def __init__(self) -> None:
        # Each reading of a thread's CPU time is 10 ms after the one before.
        readings = itertools.count(0.0, 0.01)
        self.intake = Intake(lambda: 0.0, lambda: next(readings), lambda: True)
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def become(self, client: str) -> None:
        thread_meter.set(ThreadWork(self.intake, self.turns[client], client))

    def debt(self, client: str) -> float:
        return self.intake._debts.of(client)


class Blocked:
    """Work that blocks its thread until it may continue."""

    def __init__(self) -> None:
        self.has_begun, self.may_continue = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        self.may_continue.wait()
        check_cancelled()


async def ended(clients: Clients, client: str) -> None:
    """Wait for the end of the client's work."""
    async with clients.turns[client]:
        pass


async def as_client(clients: Clients, client: str, work: Blocked) -> None:
    clients.become(client)
    await read_body_with(work, LONG)


async def test_a_client_has_one_thread_at_a_time_and_leaves_the_others_to_others() -> None:
    clients, works = Clients(), [Blocked() for _ in range(3)]
    names = ("a", "a", "b")
    tasks = [
        asyncio.ensure_future(as_client(clients, name, work))
        for name, work in zip(names, works, strict=True)
    ]
    for number in (0, 2):
        await asyncio.to_thread(works[number].has_begun.wait)
    assert not works[1].has_begun.is_set()
    for work in works:
        work.may_continue.set()
    clients.intake.is_generating = lambda: False
    await asyncio.gather(*tasks)
    assert works[1].has_begun.is_set()


async def test_the_time_of_threads_is_charged_except_what_is_exempt() -> None:
    clients = Clients()
    clients.become("a")
    await run_in_thread(lambda: None)
    await ended(clients, "a")
    assert clients.debt("a") == pytest.approx(0.01)
    await run_in_thread(lambda: exempt(0.004))
    await ended(clients, "a")
    assert clients.debt("a") == pytest.approx(0.016)


async def test_work_whose_client_left_is_charged_and_keeps_its_turn_until_it_ends() -> None:
    clients, work, logged = Clients(), Blocked(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    task = asyncio.ensure_future(as_client(clients, "a", work))
    await asyncio.to_thread(work.has_begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clients.turns["a"].locked()
    assert clients.debt("a") == 0.0
    work.may_continue.set()
    await ended(clients, "a")
    in_one_piece = PIECE_SECONDS + (0.01 - PIECE_SECONDS) * LONG_PIECE_FACTOR
    assert clients.debt("a") == pytest.approx(in_one_piece)
    del task
    gc.collect()
    assert logged == [], "that no task waits for its error is no error"


async def test_a_long_body_is_decoded_once_its_client_owes_nothing() -> None:
    clients, work = Clients(), Blocked()
    work.may_continue.set()
    clients.intake.charge(1.0, "a")
    task = asyncio.ensure_future(as_client(clients, "a", work))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not work.has_begun.is_set()
    clients.intake.is_generating = lambda: False
    await asyncio.wait_for(task, 10)
    await ended(clients, "a")
