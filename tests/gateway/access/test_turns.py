import asyncio

from gateway.access.seats import ClientTurns


async def cycles() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_client_has_one_turn_at_a_time_and_others_have_theirs() -> None:
    turns, order = ClientTurns(), list[str]()

    async def take(client: str, name: str) -> None:
        await turns.take(client)
        order.append(name)

    tasks = [asyncio.ensure_future(take("a", f"a{n}")) for n in range(3)]
    tasks.append(asyncio.ensure_future(take("b", "b")))
    await cycles()
    assert order == ["a0", "b"]
    turns.give_back("a")
    await cycles()
    assert order == ["a0", "b", "a1"]
    for client in ("a", "a", "b"):
        turns.give_back(client)
        await cycles()
    assert order == ["a0", "b", "a1", "a2"]
    assert len(turns) == 0
    await asyncio.gather(*tasks)


async def test_a_task_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    turns = ClientTurns()
    await turns.take("a")
    waiting = [asyncio.ensure_future(turns.take("a")) for _ in range(3)]
    await cycles()
    waiting[0].cancel()
    turns.give_back("a")
    waiting[1].cancel()  # its turn has come, but it has not continued yet
    await cycles()
    assert waiting[2].done()
    turns.give_back("a")
    assert len(turns) == 0
