"""Fuzzed bodies: no 5xx but an honest 503, no hang, and nothing left behind.

The same against a served model, with more bodies: `python -m tests.fuzz.fuzz_server`.
"""

import asyncio
import gc
import os
from random import Random

import pytest

from gateway.web.openapi import describe
from gateway.web.table import ROUTES
from tests.fuzz.fuzzing import Fuzzer, is_honest
from tests.gateway.rig import CHAT, MODEL, Rig, Setting, chat, play

NUM_BODIES = 500
PATIENCE = 60.0  # seconds: a request that takes longer never ends


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_bodies_get_responses_and_leave_no_requests(seed: int) -> None:
    fuzzer = Fuzzer(describe(ROUTES.routes), MODEL, Random(seed))
    statuses: dict[int, int] = {}

    async def one(rig: Rig) -> None:
        sent = fuzzer.request()
        async with asyncio.timeout(PATIENCE), rig.client.post(sent.path, sent.body) as exchange:
            await exchange.read()
        statuses[exchange.status] = statuses.get(exchange.status, 0) + 1
        assert is_honest(exchange.status, sent), (sent, exchange.status)

    async def scene(rig: Rig) -> None:
        await one(rig)
        num_tasks, num_files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        for _ in range(NUM_BODIES // 20):
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(one(rig))
        gc.collect()
        assert len(asyncio.all_tasks()) <= num_tasks
        assert len(os.listdir("/proc/self/fd")) <= num_files
        assert (await rig.client.post(CHAT, chat())).status == 200

    play(scene, Setting(max_queue_requests=1000, step=0.0001), asyncio.run)
    assert statuses[200] > NUM_BODIES // 50
    assert statuses[400] > NUM_BODIES // 2
