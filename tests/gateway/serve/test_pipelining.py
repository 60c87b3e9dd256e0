import asyncio
import gc
import weakref
from typing import Any

import pytest

from engine.simulated.virtual_loop import run_virtual
from gateway.serve.arrival import SLICE_BYTES
from gateway.serve.connection import MAX_PIPELINED
from tests.gateway.scenes import in_virtual_time
from tests.gateway.serve.recording import GET, POST, app, connect, reads_on


@in_virtual_time
async def test_of_pipelined_requests_only_a_few_are_parsed_before_they_are_answered() -> None:
    connection, _ = connect(app=reads_on)
    connection.data_received(POST * 5_000)
    await asyncio.sleep(0)
    assert len(connection.pipeline) < MAX_PIPELINED + SLICE_BYTES // len(POST) + 2
    connection.connection_lost(None)
    await asyncio.sleep(0)


@in_virtual_time
async def test_all_pipelined_requests_are_answered() -> None:
    connection, peer = connect()
    connection.data_received(POST * 3_000 + POST[:20])
    connection.data_received(POST[20:])
    for _ in range(20_000):
        await asyncio.sleep(0.0001)
        if peer.written.count(b"HTTP/1.1 204") == 3_001:
            break
    assert peer.written.count(b"HTTP/1.1 204") == 3_001
    connection.connection_lost(None)


def test_the_pipelined_requests_of_a_closed_connection_are_freed_at_once() -> None:
    async def main() -> None:
        connection, _ = connect(app=reads_on)
        connection.data_received(POST * 100)
        await asyncio.sleep(0)
        queued = weakref.ref(connection.pipeline[0][0])
        tasks = [*connection.tasks]
        connection.connection_lost(None)
        assert queued() is None
        await asyncio.wait(tasks, timeout=1)
        assert all(task.done() for task in tasks), "the request that runs saw no disconnect"

    gc.collect()
    gc.disable()
    try:
        run_virtual(main())
    finally:
        gc.enable()


async def answers_later(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(1)
    await app(scope, receive, send)


def test_a_response_whose_connection_is_lost_is_not_written_also_if_others_wait_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        connection, peer = connect(app=answers_later)
        connection.data_received(GET * 3)
        await asyncio.sleep(0.5)
        peer.is_closed = peer.is_lost = True
        connection.connection_lost(None)
        await asyncio.sleep(5)
        assert peer.written == b""

    run_virtual(main())
    assert caplog.messages == []
