import asyncio
from collections.abc import Awaitable, MutableMapping
from itertools import pairwise
from typing import Any

import pytest

from gateway.access.intake import (
    ABANDONED_SECONDS,
    BUSY_SHARE,
    LONG_PIECE_FACTOR,
    MAX_CLIENT_DEBT_SECONDS,
    MAX_CREDIT_SECONDS,
    MAX_DEBT_SECONDS,
    MAX_SHARED_SECONDS,
    PIECE_SECONDS,
    SHARE,
    Intake,
)
from gateway.observe.request_log import RequestRecord

COST = PIECE_SECONDS  # seconds that a request takes of the loop's time


class Loop:
    """A clock that a test advances, and whether the engine generates."""

    def __init__(self, *, generates: bool = True) -> None:
        self.now = 0.0
        self.generates = generates
        self.order: list[str] = []
        self.intake = Intake(lambda: self.now, lambda: self.now, lambda: self.generates, share=0.5)

    async def request(self, client: str, record: RequestRecord | None = None) -> None:
        await self.intake.enter(client)
        await self.intake.metered(self._work(client), record or RequestRecord("r", 0.0), client)

    async def _work(self, client: str) -> None:
        self.order.append(client)
        self.now += COST


async def cycles(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def started(awaitable: Awaitable[None]) -> "asyncio.Task[None]":
    return asyncio.ensure_future(awaitable)


async def test_beside_generation_requests_wait_until_their_share_allows_another_one() -> None:
    loop = Loop()
    tasks = [started(loop.request("a")) for _ in range(4)]
    await cycles(10)
    assert loop.order == ["a"], "it took more than there was"
    assert loop.intake.num_waiting == 3
    loop.now += 2 * COST  # of which half is for requests
    loop.intake._continue_one()
    await cycles(10)
    assert loop.order == ["a"] * 2
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(("is_busy", "share"), [(False, SHARE), (True, BUSY_SHARE)])
async def test_a_busy_loop_gives_requests_less(is_busy: bool, share: float) -> None:
    now = [0.0]
    intake = Intake(lambda: now[0], lambda: now[0], lambda: True, lambda: is_busy)
    intake.charge(0.5, "a")
    now[0] += 0.1
    intake.charge(0.0)
    assert intake._debts.of("a") == pytest.approx(0.5 - 0.1 * share)


async def test_without_generation_no_request_waits() -> None:
    loop = Loop(generates=False)
    for _ in range(100):
        await loop.request("a")
    assert len(loop.order) == 100


async def test_unused_time_is_not_saved_beyond_a_bound() -> None:
    loop = Loop()
    loop.intake.charge(0.0)
    loop.now += 1000.0
    loop.intake.charge(MAX_CREDIT_SECONDS + 1e-6, "a")
    waiting = started(loop.intake.enter("a"))
    await cycles(5)
    assert not waiting.done()
    loop.generates = False
    await asyncio.wait_for(waiting, 10)


async def test_one_request_continues_in_each_cycle_of_the_loop_and_clients_alternate() -> None:
    loop = Loop()
    for client in ("a", "b"):
        loop.intake.charge(0.5, client)
    order: list[str] = []

    async def enter(client: str) -> None:
        await loop.intake.enter(client)
        order.append(client)

    tasks = [started(enter(client)) for client in ("a", "a", "a", "b")]
    await cycles(3)
    assert order == []
    loop.now += 3.0  # the timer of the real loop comes later
    loop.intake._continue_one()
    seen = []
    for _ in range(6):
        await cycles(1)
        seen.append(len(order))
    assert order == ["a", "b", "a", "a"]
    assert max(after - before for before, after in pairwise(seen)) == 1
    await asyncio.gather(*tasks)


async def test_a_cancelled_request_leaves_the_queue_to_the_others() -> None:
    loop = Loop()
    loop.intake.charge(1.0, "a")
    tasks = [started(loop.intake.enter("a")) for _ in range(3)]
    await cycles(2)
    tasks[0].cancel()
    await cycles(2)
    loop.generates = False
    loop.intake._continue_one()
    await asyncio.wait_for(asyncio.gather(*tasks[1:]), 10)


async def test_a_body_is_received_in_shares_and_the_disconnect_without_waiting() -> None:
    loop = Loop()
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"1", "more_body": True},
        {"type": "http.request", "body": b"2"},
        {"type": "http.disconnect"},
    ]

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    gated = loop.intake.gated(receive, "a")
    assert (await gated())["body"] == b"1"
    loop.intake.charge(1.0, "a")
    second = started(gated())  # type: ignore[arg-type] # only whether it is done counts
    await cycles(5)
    assert not second.done()
    loop.now += 10.0
    loop.intake._continue_one()
    await asyncio.wait_for(second, 10)
    loop.intake.charge(1.0, "a")
    assert (await asyncio.wait_for(gated(), 10))["type"] == "http.disconnect"


async def test_time_is_charged_until_the_engine_has_the_request() -> None:
    loop, record = Loop(), RequestRecord("r", 0.0)
    loop.intake.share = loop.intake.busy_share = 0.0  # nothing is repaid meanwhile

    async def work() -> None:
        loop.now += 0.002
        await asyncio.sleep(0)
        record.num_running = 1
        loop.now += 0.004
        await asyncio.sleep(0)
        loop.now += 1000.0  # tokens are sent

    await loop.intake.metered(work(), record, "a")
    assert loop.intake._debts.of("a") == pytest.approx(0.006)


async def test_time_is_charged_until_the_engine_has_all_requests_of_a_response() -> None:
    loop, record = Loop(), RequestRecord("r", 0.0, num_running=1, is_starting=True)
    loop.intake.share = loop.intake.busy_share = 0.0

    async def work() -> None:
        loop.now += 0.002
        await asyncio.sleep(0)
        record.is_starting = False
        loop.now += 0.004
        await asyncio.sleep(0)
        loop.now += 1000.0

    await loop.intake.metered(work(), record, "a")
    assert loop.intake._debts.of("a") == pytest.approx(0.006)


async def test_what_exceeds_5_ms_in_one_piece_is_charged_several_fold() -> None:
    loop = Loop()

    async def work() -> None:
        for seconds in (0.003, PIECE_SECONDS, 0.025):
            loop.now += seconds
            await asyncio.sleep(0)

    loop.intake.share = loop.intake.busy_share = 0.0  # nothing is repaid meanwhile
    await loop.intake.metered(work(), None, "a")
    assert loop.intake._debts.of("a") == pytest.approx(0.013 + 0.020 * LONG_PIECE_FACTOR)


async def test_what_others_take_meanwhile_is_not_charged() -> None:
    now = cpu = 0.0
    intake = Intake(lambda: now, lambda: cpu, lambda: True)

    async def work() -> None:
        nonlocal now, cpu
        now += 5.0  # another thread had the interpreter's lock
        cpu += 0.004

    await intake.metered(work(), RequestRecord("r", 0.0), "a")
    assert intake._debts.of("a") == pytest.approx(0.004)


async def test_errors_and_cancellations_reach_the_metered_request() -> None:
    loop, seen = Loop(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task = started(loop.intake.metered(work(), RequestRecord("r", 0.0)))
    await cycles(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("wrong")

    with pytest.raises(KeyError):
        await loop.intake.metered(fails(), RequestRecord("r", 0.0))


async def test_others_wait_for_a_small_part_of_what_one_client_owes() -> None:
    loop = Loop()
    loop.intake.charge(60.0, "attacker")
    attacker = started(loop.intake.enter("attacker"))
    await cycles(3)
    other = started(loop.intake.enter("other"))
    loop.now += MAX_SHARED_SECONDS / 0.5
    loop.intake._continue_one()
    await cycles(3)
    assert (attacker.done(), other.done()) == (False, True)
    loop.now += MAX_CLIENT_DEBT_SECONDS / 0.5
    loop.intake._continue_one()
    await cycles(3)
    assert attacker.done()


async def test_a_client_that_owes_nothing_does_not_wait_behind_others_that_do() -> None:
    loop = Loop()
    loop.intake.charge(1.0, "attacker")
    loop.now += 0.1
    waiting = started(loop.intake.enter("attacker"))
    await cycles(3)
    async with asyncio.timeout(0):
        await loop.intake.enter("other")
    waiting.cancel()


async def test_many_clients_that_begin_at_once_wait_for_each_other() -> None:
    loop = Loop()
    for client in range(100):
        loop.intake.charge(COST, str(client))
    other = started(loop.intake.enter("other"))
    await cycles(3)
    assert not other.done()
    loop.now += MAX_DEBT_SECONDS / 0.5
    loop.intake._continue_one()
    await asyncio.wait_for(other, 10)


async def test_where_there_is_no_common_debt_each_client_waits_for_its_own() -> None:
    loop = Loop()
    loop.intake.max_debt = 0.0
    for client in range(100):
        loop.intake.charge(COST, str(client))
    async with asyncio.timeout(0):
        await loop.intake.enter("other")
    debtor = started(loop.intake.enter("0"))
    await cycles(3)
    assert not debtor.done()
    debtor.cancel()


async def test_when_generation_ends_those_who_wait_continue_without_a_further_request() -> None:
    loop = Loop()
    loop.intake.charge(60.0, "a")
    waiting = started(loop.intake.enter("a"))
    await cycles(3)
    loop.generates = False
    await asyncio.wait_for(waiting, 10)


async def test_what_was_computed_for_a_client_that_left_is_its_debt_and_no_other_clients() -> None:
    loop = Loop()
    for _ in range(10):
        loop.intake.abandoned("leaves")
    other = started(loop.intake.enter("other"))
    again = started(loop.intake.enter("leaves"))
    await cycles(5)
    assert other.done()
    assert not again.done()
    loop.now += 10 * ABANDONED_SECONDS / 0.5
    loop.intake._continue_one()
    await asyncio.wait_for(again, 10)
