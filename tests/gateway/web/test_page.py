import asyncio
import gzip
from pathlib import Path
from typing import Any

import pytest

from gateway.observe.live import LiveView
from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, play, played, text

HTML = {"accept": "text/html,*/*"}
RECORDING = Path(__file__).parents[2] / "replays" / "fcfs_grow.jsonl"


@played()
async def test_browsers_get_the_page_and_other_clients_a_short_text(rig: Rig) -> None:
    exchange = await rig.client.get("/", HTML)
    assert b"<title>Podway</title>" in exchange.content
    policy = exchange.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    exchange = await rig.client.get("/", {"accept": "*/*"})
    assert b"curl -N " in exchange.content
    assert exchange.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    "name", ["app.js", "chat/chat.js", "style.css", "icon.svg", "vendor/LICENSES.txt"]
)
@played(Setting(keys=("secret",)))
async def test_files_of_the_page_need_no_key(rig: Rig, name: str) -> None:
    exchange = await rig.client.get(f"/page/{name}")
    assert exchange.content
    assert exchange.status == 200
    assert exchange.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [("gzip, deflate, br", True), ("gzip;q=0.5", True), ("gzip;q=0, br", False), ("br", False)],
)
@played()
async def test_files_are_compressed_for_clients_that_accept_it(
    rig: Rig, accepted: str, is_compressed: bool
) -> None:
    exchange = await rig.client.get("/page/app.js", {"accept-encoding": accepted})
    content = exchange.content
    assert exchange.headers.get("content-encoding") == ("gzip" if is_compressed else None)
    assert exchange.headers["vary"] == "accept-encoding"
    assert b"KeyDialog" in (gzip.decompress(content) if is_compressed else content)


@pytest.mark.parametrize("name", ["nothing.js", "../app.py", "vendor/", "%2e%2e/app.py"])
@played()
async def test_only_files_of_the_page_are_served(rig: Rig, name: str) -> None:
    exchange = await rig.client.get(f"/page/{name}")
    assert exchange.status == 404


async def snapshots(rig: Rig, count: int) -> list[dict[str, Any]]:
    """The first events of /admin/live."""
    found: list[dict[str, Any]] = []
    async with rig.client.get("/admin/live") as exchange:
        async for event in exchange.events():
            found.append(event)
            if len(found) == count:
                break
    return found


@played()
async def test_the_live_view_shows_iterations_requests_and_kv(rig: Rig) -> None:
    body = text(prompt="a" * 10, max_tokens=30, ignore_eos=True)
    async with rig.client.post(TEXT, body, {"x-request-id": "seen"}) as exchange:
        found = await snapshots(rig, 12)
        await exchange.json()
    last = found[-1]
    assert last["counts"] == {"running": 1, "waiting": 0, "swapped": 0}
    (request,) = last["requests"]
    assert (request["label"], request["state"], request["prompt"]) == ("seen", "decode", 10)
    assert last["kv"]["device"]["held"] >= 10
    numbers = [each["number"] for snapshot in found for each in snapshot["iterations"]]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= int(12 * 0.1 / STEP) - 1


def test_the_state_is_made_once_per_tick_for_all_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    snapshot = LiveView.snapshot

    def count(self: LiveView, *args: Any) -> dict[str, Any]:
        made.append(args[-1])
        return snapshot(self, *args)

    monkeypatch.setattr(LiveView, "snapshot", count)

    async def scene(rig: Rig) -> None:
        async with rig.client.post(TEXT, text(max_tokens=20, ignore_eos=True)) as exchange:
            found = await asyncio.gather(*(snapshots(rig, 12) for _ in range(5)))
            await exchange.json()
        numbers = [
            [each["number"] for one in watched for each in one["iterations"]] for watched in found
        ]
        assert numbers[0]
        assert all(each == numbers[0] for each in numbers)

    play(scene)
    assert len(made) <= 13


@played()
async def test_nothing_is_recorded_while_nobody_watches(rig: Rig) -> None:
    await rig.client.post(TEXT, text(prompt="a", max_tokens=5))
    assert not rig.service.live._iterations
    assert rig.service.live._num_watchers == 0
    await snapshots(rig, 1)
    await asyncio.sleep(0)
    assert rig.service.live._num_watchers == 0


@played(Setting(max_batch_size=1))
async def test_a_queued_request_shows_what_it_waits_for(rig: Rig) -> None:
    body = text(prompt="a" * 10, max_tokens=40, ignore_eos=True)
    first = asyncio.create_task(rig.client.post(TEXT, body).__aenter__())
    await asyncio.sleep(2 * STEP)
    second = asyncio.create_task(rig.client.post(TEXT, body).__aenter__())
    await asyncio.sleep(2 * STEP)
    (snapshot,) = (await snapshots(rig, 1))[:1]
    assert [each["waits_for"] for each in snapshot["requests"]] == ["", "a seat"]
    for task in (first, second):
        await (await task).json()


@played(Setting(num_blocks=70, num_host_blocks=200, prefix_cache=False))
async def test_requests_whose_kv_is_on_the_host_count_as_swapped(rig: Rig) -> None:
    body = text(prompt="a" * 20, max_tokens=30, ignore_eos=True)
    tasks = [asyncio.create_task(rig.client.post(TEXT, body).__aenter__()) for _ in range(2)]
    await asyncio.sleep(25 * STEP)
    (snapshot,) = await snapshots(rig, 1)
    states = sorted(each["state"] for each in snapshot["requests"])
    assert states == ["decode", "swapped"]
    assert snapshot["counts"] == {"running": 1, "waiting": 0, "swapped": 1}
    for task in tasks:
        await (await task).json()


@played(Setting(policy="mlfq"))
async def test_requests_show_their_level_of_a_policy_with_several_queues(rig: Rig) -> None:
    body = text(prompt="a" * 10, max_tokens=40, ignore_eos=True)
    task = asyncio.create_task(rig.client.post(TEXT, body).__aenter__())
    await asyncio.sleep(2 * STEP)
    (snapshot,) = await snapshots(rig, 1)
    levels = snapshot["levels"]
    (request,) = snapshot["requests"]
    assert sum(levels) == 1
    assert levels[request["level"]] == 1
    await (await task).json()


@played(Setting(max_queue_requests=400))
async def test_a_snapshot_shows_running_requests_before_the_queue_and_is_bounded(rig: Rig) -> None:
    tasks = [
        asyncio.create_task(rig.client.post(TEXT, text(max_tokens=3)).__aenter__())
        for _ in range(300)
    ]
    await asyncio.sleep(2 * STEP)
    (snapshot,) = await snapshots(rig, 1)
    assert snapshot["num_requests"] > len(snapshot["requests"]) == 200
    waiting = [each["state"] == "waiting" for each in snapshot["requests"]]
    assert waiting == [False] * 8 + [True] * 192
    for task in tasks:
        await (await task).json()


@played(Setting(texts=("abcdefgh",), itl_goal=STEP / 2))
async def test_the_live_view_shows_the_itl_goal_and_the_error_of_the_cost_model(rig: Rig) -> None:
    assert (await snapshots(rig, 1))[0]["cost_error"] is None
    await rig.client.post(CHAT, chat(max_tokens=4))
    (snapshot,) = await snapshots(rig, 1)
    assert snapshot["itl_goal"] == {"seconds": STEP / 2, "steps": 3, "exceeded": 3}
    assert set(snapshot["cost_error"]) == {"median", "p90"}


@pytest.mark.parametrize("recording", [b"", b"[1]", b"x" * 1000])
@played()
async def test_a_body_that_is_no_recording_is_rejected_without_a_simulation(
    rig: Rig, recording: bytes
) -> None:
    exchange = await rig.client.post("/admin/simulate", recording)
    assert exchange.status == 400
    assert exchange.json["error"]["param"] == "recording"
