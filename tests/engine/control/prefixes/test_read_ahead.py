"""Copies on the disk are read for a request that has to wait, and dropped when it has ended."""

import asyncio

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.kv.ledger import KVLedger
from engine.kv.prefix import hash_blocks
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import RequestSpec
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import PageKind, ReadAhead, StoredPage, Tier
from engine.stream import TokenStream
from tests.scheduling import GREEDY

BLOCK = 4
PROMPT = tuple(range(100, 117))
ONE_SECOND = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)


def scheduler(
    host: int = 0, windows: tuple[int | None, ...] = (None,), states: int = 0
) -> IterationScheduler:
    settings = SchedulerSettings(max_model_len=64, max_batch_size=4, max_batch_tokens=64)
    ledger = KVLedger(
        KVShape(
            60,
            BLOCK,
            host,
            40,
            saves_on_host=True,
            windows=windows,
            chunk=64,
            num_states=states,
            num_disk_states=states,
        )
    )
    return IterationScheduler(settings, ledger, FirstComeFirstServed())


def on_disk(found: IterationScheduler) -> list[bytes]:
    """The blocks of the prompt are on the disk, from slot 1 on."""
    hashes = hash_blocks("", PROMPT, BLOCK)
    found.kv.search.restore_disk({PageKind.BLOCK: b"".join([bytes(16), *hashes])})
    return hashes


def blocks(hashes: list[bytes]) -> tuple[StoredPage, ...]:
    """The copies of `on_disk`."""
    return tuple(StoredPage(PageKind.BLOCK, slot, name) for slot, name in enumerate(hashes, 1))


def test_what_only_the_disk_has_is_read() -> None:
    found = scheduler()
    hashes = on_disk(found)
    request = found.add(RequestSpec(PROMPT, 3, GREEDY), 0.0)
    copies = found.kv.search.read_ahead(request)
    assert copies == ReadAhead(request.request_id, blocks(hashes))
    other = found.add(RequestSpec(tuple(range(30)), 3, GREEDY), 0.0)
    assert found.kv.search.read_ahead(other) is None


def test_what_the_host_has_too_is_not_read() -> None:
    found = scheduler(host=8)
    hashes = on_disk(found)
    copies = found.ledger.blocks.lower[Tier.HOST]
    for block_hash in hashes[:3]:
        copies.put(block_hash)
        copies.finish_put(block_hash, is_complete=True)
    request = found.add(RequestSpec(PROMPT, 3, GREEDY), 0.0)
    expected = ReadAhead(request.request_id, blocks(hashes)[3:])
    assert found.kv.search.read_ahead(request) == expected


def test_blocks_that_a_request_cannot_start_behind_are_not_read() -> None:
    found = scheduler(states=4)  # without a snapshot
    on_disk(found)
    request = found.add(RequestSpec(PROMPT, 3, GREEDY), 0.0)
    assert found.kv.search.read_ahead(request) is None


def test_a_snapshot_is_read_with_its_blocks() -> None:
    found = scheduler(states=4)
    hashes = on_disk(found)
    (name,) = found.ledger.states.names(hashes)
    found.kv.search.restore_disk({PageKind.SNAPSHOT: bytes(16) + name})
    request = found.add(RequestSpec(PROMPT, 3, GREEDY), 0.0)
    expected = ReadAhead(
        request.request_id, (*blocks(hashes), StoredPage(PageKind.SNAPSHOT, 1, name))
    )
    assert found.kv.search.read_ahead(request) == expected


async def finish(stream: TokenStream) -> None:
    while (await stream.next()).finish is None:
        pass


def test_a_request_that_waits_has_its_copies_read_until_it_has_ended() -> None:
    read: list[ReadAhead] = []
    found = scheduler()
    hashes = on_disk(found)

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        engine = Engine(found, SimulatedExecutor(ONE_SECOND), clock, read_ahead=read.append)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.run())
            with engine.stream(RequestSpec(PROMPT, 1, GREEDY)) as first:
                await finish(first)
            assert not read  # it did not have to wait
            found.ledger.pool.discard(0)
            with engine.stream(RequestSpec((1,) * 9, 3, GREEDY)):
                await asyncio.sleep(0.5)
                for block in sorted(found.ledger.prefixes.pages):
                    found.ledger.pool.discard(block)
                with engine.stream(RequestSpec(PROMPT, 1, GREEDY)) as second:
                    request_id = second.request.request_id
                    assert read == [ReadAhead(request_id, blocks(hashes))]
                    await finish(second)
            assert read[1:] == [ReadAhead(request_id)]
            running.cancel()

    run_virtual(main())
