import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from engine.request import Abort
from gateway.access.key_file import Allowance
from tests.gateway.forms import (
    batch_of,
    chat_lines,
    ended,
    lines_of,
    started,
    uploaded,
)
from tests.gateway.rig import CHAT, STEP, Rig, Setting, chat, key, play, played


@played(Setting(keys=("a", "b")))
async def test_a_batch_is_visible_to_its_own_key_only(rig: Rig) -> None:
    batch_id = await started(rig, chat_lines(1), key("a"))
    for method, path in [("GET", ""), ("POST", "/cancel")]:
        path = f"/v1/batches/{batch_id}{path}"
        exchange = await rig.client.send(method, path, headers=key("b"))
        assert (exchange.status, exchange.json["error"]["code"]) == (404, "batch_not_found")
    assert (await rig.client.get("/v1/batches", key("b"))).json["data"] == []
    file_id = await uploaded(rig, chat_lines(1), key("a"))
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    assert (await rig.client.post("/v1/batches", body, key("b"))).status == 400
    await asyncio.sleep(10 * STEP)


@played(Setting(keys=("a",), allowance=Allowance(tokens_per_minute=40)))
async def test_lines_do_not_count_against_the_other_requests_of_their_key(rig: Rig) -> None:
    batch_id = await started(rig, chat_lines(3), key("a"))
    await asyncio.sleep(20)
    assert (await rig.client.get(f"/v1/batches/{batch_id}", key("a"))).json["status"] == "completed"
    async with rig.client.post(CHAT, chat(), key("a")) as exchange:
        assert await exchange.start() == 200
    assert exchange.headers["x-ratelimit-remaining-tokens"] == "40"


def test_lines_wait_until_their_key_has_tokens(tmp_path: Path) -> None:
    """The bucket of `a` holds 60 tokens and gets one per second; `b` has no limit."""

    async def scene(rig: Rig) -> None:
        batch_ids = [await started(rig, chat_lines(40), key(name)) for name in ("a", "b")]
        counts: dict[str, int] = {}
        for name, batch_id, seconds in (("b", batch_ids[1], 60), ("a", batch_ids[0], 900)):
            await asyncio.sleep(seconds)
            exchange = await rig.client.get(f"/v1/batches/{batch_id}", key(name))
            counts[name] = exchange.json["request_counts"]["completed"]
        assert counts == {"b": 40, "a": 40}
        lines = [request for request in rig.ended if request.spec.tenant == "a"]
        tokens = sum(request.prompt_len + request.produced for request in lines)
        last = max(request.times.arrived_at for request in lines) - lines[0].times.arrived_at
        assert last > (tokens - 60 - 8 * 20) / 1.0, "one token per second"

    path = tmp_path / "keys.toml"
    path.write_text('[a]\nkey = "a"\ntokens_per_minute = 60\n[b]\nkey = "b"')
    play(scene, Setting(key_file=path))


@played()
async def test_a_line_can_be_cancelled_by_its_request_id(rig: Rig) -> None:
    batch_id = await started(rig, chat_lines(2))
    await asyncio.sleep(3 * STEP)
    assert (await rig.client.post(f"/v1/requests/{batch_id}_2/cancel", b"")).status == 200
    batch = await ended(rig, batch_id)
    (error,) = await lines_of(rig, batch["error_file_id"])
    assert error["custom_id"] == "line-1"
    assert error["response"]["request_id"] == f"{batch_id}_2"
    assert error["response"]["body"]["error"]["code"] == "request_cancelled"
    assert rig.ended[0].abort is Abort.EXPLICIT


@pytest.mark.parametrize("moments", [(0.0,), (0.5,), (2.1, 2.1), (1.0, 0.0, 3.0, 0.1)])
def test_a_batch_survives_restarts_and_answers_each_line_once(
    tmp_path: Path, moments: tuple[float, ...]
) -> None:
    setting = Setting(store=tmp_path / "store.sqlite", max_batch_size=3)
    ids: list[str] = []
    answered: list[int] = []

    async def begin(rig: Rig) -> None:
        ids.append(await started(rig, chat_lines(30)))
        await asyncio.sleep(moments[0])
        answered.append((await batch_of(rig, ids[0]))["request_counts"]["completed"])

    async def go_on(rig: Rig, seconds: float) -> None:
        await asyncio.sleep(seconds)
        counts = (await batch_of(rig, ids[0]))["request_counts"]
        assert counts["completed"] >= answered[-1]
        answered.append(counts["completed"])

    async def end(rig: Rig) -> None:
        batch = await ended(rig, ids[0])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        output = await lines_of(rig, batch["output_file_id"])
        assert [line["custom_id"] for line in output] == [f"line-{i}" for i in range(30)]

    play(begin, setting)
    for seconds in moments[1:]:
        setting = replace(setting, seed=setting.seed + 1)
        play(partial(go_on, seconds=seconds), setting)
    assert answered[-1] < 30
    rig = play(end, replace(setting, seed=99))
    assert sum(request.outcome == "finished" for request in rig.ended) == 30 - answered[-1]


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing"])
@played()
async def test_a_batch_that_was_read_before_its_end_does_not_run_again(
    rig: Rig, status: str
) -> None:
    """As when the batches of a former server are read once more, while some of them end."""
    batch_id = await started(rig, chat_lines(2))
    batch = await ended(rig, batch_id)
    queue = rig.service.store.batch_queue
    record = await queue.batches.find(batch_id, "")
    queue.arrivals.put_nowait(msgspec.structs.replace(record, status=status))
    await asyncio.sleep(20 * STEP)
    assert await ended(rig, batch_id) == batch
    assert len(await lines_of(rig, batch["output_file_id"])) == 2
    assert len(rig.ended) == 2


def test_a_batch_that_was_being_cancelled_is_cancelled_after_a_restart(tmp_path: Path) -> None:
    setting = Setting(store=tmp_path / "store.sqlite", max_batch_size=1)
    ids: list[str] = []

    async def begin(rig: Rig) -> None:
        ids.append(await started(rig, chat_lines(5)))
        await asyncio.sleep(9 * STEP)
        await rig.service.store.batch_queue.batches.cancel(ids[0], "", rig.service.unix_now())

    async def end(rig: Rig) -> None:
        batch = await ended(rig, ids[0])
        assert batch["status"] == "cancelled"
        assert batch["request_counts"]["completed"] == 1
        assert len(await lines_of(rig, batch["output_file_id"])) == 1

    play(begin, setting)
    rig = play(end, replace(setting, seed=99))
    assert not rig.ended


def test_the_lines_of_a_revoked_key_are_not_generated(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("[a]\nkey = 'sk-a'\n[b]\nkey = 'sk-b'\n")

    async def scene(rig: Rig) -> None:
        batch_id = await started(rig, chat_lines(60), key("sk-a"))
        keys.write_text("[b]\nkey = 'sk-b'\n")
        rig.service.keys.reload()
        await asyncio.sleep(60)
        record = await rig.service.store.batch_queue.batches.find(batch_id, "a")
        assert record.num_completed + record.num_failed == 60
        assert record.num_completed <= 8, "only those that ran when the key was revoked"

    play(scene, Setting(key_file=keys))
