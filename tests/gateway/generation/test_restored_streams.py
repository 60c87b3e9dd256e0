import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.dialects.choosing import choose_dialect
from engine.simulated.virtual_loop import run_virtual
from gateway.generation.restored_streams import restore_streams
from gateway.store.event_ring import RingLimits
from gateway.web.table import ROUTES
from tests.gateway.rig import CHAT, MODEL, STEP, USER, Rig, Setting, build_rig, play
from tests.wire.response_check import data_of

STORY = "<think>Hm, well.</think>A story that is long enough to be interrupted."
CALL = '<tool_call>\n{"name": "f", "arguments": {"input": "a"}}\n</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
NAMED = {"x-conversation-id": "talk"}
LENGTH = 200 * STEP  # more than any of these streams takes
Scene = Callable[[Rig], Awaitable[None]]


def setting(path: Path, **fields: Any) -> Setting:
    dialect = choose_dialect("", "hermes", "think")
    return Setting(texts=(STORY + CALL,), dialect=dialect, store=path, **fields)


def play_until_killed(scene: Scene, of: Setting) -> None:
    """Play a scene, and end as a server that is killed: nothing is drained or closed."""

    async def main() -> None:
        rig = build_rig(of)
        running = asyncio.create_task(rig.engine.run())
        await restore_streams(rig.service, ROUTES.planners)
        await scene(rig)
        rig.service.store.close()
        running.cancel()

    run_virtual(main())


async def read(rig: Rig, path: str, headers: dict[str, str] | None = None) -> bytes:
    exchange = await rig.client.get(path, headers)
    assert exchange.status == 200
    return exchange.content


async def begin(rig: Rig, path: str, body: dict[str, Any], seconds: float) -> tuple[str, bytes]:
    """Begin a stream and read it for so long: where it is read again, and what was read."""
    asked = {"model": MODEL, "stream": True, **body}
    headers = {} if body.get("background") else NAMED
    pieces = []
    async with rig.client.post(path, asked, headers) as exchange:
        try:
            async with asyncio.timeout(seconds):
                async for piece in exchange.chunks():
                    pieces.append(piece)
        except TimeoutError:
            exchange.disconnect()
        await exchange.ended()
    seen = b"".join(pieces)
    if not body.get("background"):
        return "/v1/stream/talk", seen
    response_id = json.loads(data_of(seen.split(b"\n\n")[0]))["response"]["id"]
    return f"/v1/responses/{response_id}?stream=true", seen


def without_end(stream: bytes) -> list[bytes]:
    """The events, without the moment in which a response was complete."""
    return [event.split(b'"completed_at":')[0] for event in stream.split(b"\n\n")]


BODIES = pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 100, "seed": 5}),
        ("/v1/messages", {"messages": USER, "max_tokens": 150}),
        ("/v1/responses", {"input": "hi", "tools": [TOOL], "background": True}),
    ],
)


@BODIES
@pytest.mark.parametrize("steps", [1.5, 20.5, 60.5])
def test_a_stream_runs_again_with_the_same_events_after_the_server_was_killed(
    path: str, body: dict[str, Any], steps: float, tmp_path: Path
) -> None:
    known: dict[str, Any] = {}

    async def undisturbed(rig: Rig) -> None:
        known["place"], known["whole"] = await begin(rig, path, body, LENGTH)

    async def killed(rig: Rig) -> None:
        place, known["seen"] = await begin(rig, path, body, steps * STEP)
        assert place == known["place"]

    async def restored(rig: Rig) -> None:
        whole = await read(rig, known["place"])
        assert without_end(whole) == without_end(known["whole"])
        assert whole.startswith(known["seen"])
        number = known["seen"].count(b"\nid: ")
        rest = await read(rig, known["place"], {"last-event-id": str(number)})
        assert number == 0 or path == "/v1/responses" or known["seen"] + rest == whole
        if path == "/v1/responses":
            rest = await read(rig, f"{known['place']}&starting_after={number}")
            assert known["seen"] + rest == whole
            response = json.loads(await read(rig, known["place"].partition("?")[0]))
            assert response["status"] == "completed"

    play(undisturbed, setting(tmp_path / "one"))
    play_until_killed(killed, setting(tmp_path / "two"))
    play(restored, setting(tmp_path / "two", seed=9))


@pytest.mark.parametrize("in_conversation", [False, True])
def test_a_response_that_was_stored_before_the_kill_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_conversation: bool
) -> None:
    """The server is killed between storing the response and noting that its stream has ended."""
    known: dict[str, Any] = {}
    body: dict[str, Any] = {"input": "hi", "background": True}

    async def killed(rig: Rig) -> None:
        if in_conversation:
            exchange = await rig.client.post("/v1/conversations", {})
            body["conversation"] = json.loads(exchange.content)["id"]

        async def never(*args: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(rig.service.store.journal, "end", never)
        known["place"], known["seen"] = await begin(rig, "/v1/responses", body, LENGTH)

    async def restored(rig: Rig) -> None:
        whole = await read(rig, known["place"])
        assert b"response.completed" in whole
        assert whole.startswith(known["seen"])
        response = json.loads(await read(rig, known["place"].partition("?")[0]))
        assert response["status"] == "completed"
        if in_conversation:
            items = await read(rig, f"/v1/conversations/{body['conversation']}/items")
            assert len(json.loads(items)["data"]) == 1 + len(response["output"])

    play_until_killed(killed, setting(tmp_path / "store"))
    play(restored, setting(tmp_path / "store", seed=9))


def test_a_stream_is_restored_after_any_number_of_kills(tmp_path: Path) -> None:
    known: dict[str, Any] = {}

    async def first(rig: Rig) -> None:
        known["place"], known["seen"] = await begin(rig, CHAT, {"messages": USER}, 9.5 * STEP)

    async def again(rig: Rig) -> None:
        await asyncio.sleep(30 * STEP)

    async def last(rig: Rig) -> None:
        assert (await read(rig, known["place"])).startswith(known["seen"])

    play_until_killed(first, setting(tmp_path / "store"))
    for _ in range(3):
        play_until_killed(again, setting(tmp_path / "store"))
    rig = play(last, setting(tmp_path / "store"))
    assert len(rig.ended) == 1


@BODIES
def test_a_stream_that_had_ended_is_read_again_and_not_computed_again(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    known: dict[str, Any] = {}

    async def first(rig: Rig) -> None:
        known["place"], known["whole"] = await begin(rig, path, body, LENGTH)

    async def restored(rig: Rig) -> None:
        assert await read(rig, known["place"]) == known["whole"]

    play_until_killed(first, setting(tmp_path / "store"))
    assert play(restored, setting(tmp_path / "store")).ended == []


def test_what_was_deleted_or_cancelled_does_not_run_again(tmp_path: Path) -> None:
    async def first(rig: Rig) -> None:
        await begin(rig, CHAT, {"messages": USER}, 5.5 * STEP)
        assert (await rig.client.send("DELETE", "/v1/stream/talk")).status == 200
        body = {"input": "hi", "background": True}
        place, _ = await begin(rig, "/v1/responses", body, 5.5 * STEP)
        assert (await rig.client.post(f"{place.partition('?')[0]}/cancel", {})).status == 200
        await asyncio.sleep(STEP)

    async def restored(rig: Rig) -> None:
        await asyncio.sleep(10 * STEP)
        assert (await rig.client.get("/v1/stream/talk")).status == 404

    play_until_killed(first, setting(tmp_path / "store"))
    assert play(restored, setting(tmp_path / "store")).ended == []


def test_a_record_that_cannot_run_again_is_dropped_and_the_server_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def first(rig: Rig) -> None:
        await begin(rig, CHAT, {"messages": USER}, 5.5 * STEP)

    async def restored(rig: Rig) -> None:
        assert (await rig.client.get("/v1/stream/talk", {"x-api-key": "another"})).status == 404
        assert await rig.service.store.journal.running() == []

    play_until_killed(first, setting(tmp_path / "store", keys=()))
    play(restored, setting(tmp_path / "store", keys=("another",)))
    assert "cannot run again: its API key" in caplog.text


def test_a_journal_of_another_form_does_not_keep_the_server_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(rig: Rig) -> None:
        insert = "INSERT INTO stream (id, num_bytes, record) VALUES ('x', 1, x'c1')"
        await rig.service.store.database.write(lambda db: db.execute(insert))

    async def restored(rig: Rig) -> None:
        assert (await begin(rig, CHAT, {"messages": USER}, LENGTH))[1].endswith(b"[DONE]\n\n")

    play_until_killed(broken, setting(tmp_path / "store"))
    play(restored, setting(tmp_path / "store"))
    assert "the streams of the former server are lost" in caplog.text


def test_a_server_that_drains_leaves_its_streams_to_the_next(tmp_path: Path) -> None:
    known: dict[str, Any] = {}

    async def drained(rig: Rig) -> None:
        known["place"], known["seen"] = await begin(rig, CHAT, {"messages": USER}, 9.5 * STEP)
        await rig.engine.drain(0)
        await rig.service.store.held.close()

    async def restored(rig: Rig) -> None:
        whole = await read(rig, known["place"])
        assert whole.startswith(known["seen"])
        assert whole.endswith(b"data: [DONE]\n\n")

    play_until_killed(drained, setting(tmp_path / "store"))
    play(restored, setting(tmp_path / "store"))


def test_a_restored_stream_belongs_to_its_key_and_waits_for_room(tmp_path: Path) -> None:
    of = setting(tmp_path / "store", keys=("a", "b"))
    places = {}

    async def first(rig: Rig) -> None:
        body = {"model": MODEL, "input": "hi", "background": True}
        for key in ("a", "b", "a"):
            exchange = await rig.client.post("/v1/responses", body, {"x-api-key": key})
            places[exchange.json["id"]] = key

    async def restored(rig: Rig) -> None:
        await asyncio.sleep(4 * LENGTH)
        for response_id, key in places.items():
            path = f"/v1/responses/{response_id}"
            other = {"a": "b", "b": "a"}[key]
            assert (await rig.client.get(path, {"x-api-key": other})).status == 404
            assert (await rig.client.get(path, {"x-api-key": key})).json["status"] == "completed"

    play_until_killed(first, of)
    play(restored, replace(of, max_queue_requests=1, max_batch_size=1))


def test_nothing_is_journalled_where_the_store_is_in_memory_or_the_stream_is_not_kept(
    tmp_path: Path,
) -> None:
    async def scene(rig: Rig) -> None:
        await rig.client.post(
            CHAT, {"model": MODEL, "messages": USER, "stream": True}, {"idempotency-key": "x"}
        )
        assert await rig.service.store.journal.ended(rig.service.unix_now()) == []

    play(scene, setting(tmp_path / "store"))


def test_the_journal_forgets_old_streams_and_keeps_to_its_limit(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        journal, names = rig.service.store.journal, ("one", "two", "three")
        for name in names:
            await rig.client.post(
                CHAT,
                {"model": MODEL, "messages": USER, "stream": True},
                {"x-conversation-id": name},
            )
        kept = [ended.record.names for ended in await journal.ended(rig.service.unix_now())]
        assert kept == [["three"]]
        await asyncio.sleep(61)
        assert await journal.ended(rig.service.unix_now()) == []

    rings = RingLimits(total_bytes=50_000, seconds=60.0)
    play(scene, setting(tmp_path / "store", rings=rings))


@BODIES
@pytest.mark.parametrize("steps", [1.5, 30.5])
def test_a_stream_has_the_same_events_after_its_worker_died(
    path: str, body: dict[str, Any], steps: float, tmp_path: Path
) -> None:
    known: dict[str, Any] = {}

    async def undisturbed(rig: Rig) -> None:
        known["place"], known["whole"] = await begin(rig, path, body, LENGTH)

    async def disturbed(rig: Rig) -> None:
        asyncio.get_running_loop().call_later(steps * STEP, rig.executor.kill)
        place, seen = await begin(rig, path, body, LENGTH)
        assert place == known["place"]
        assert without_end(seen) == without_end(known["whole"])
        assert await read(rig, place) == seen

    play(undisturbed, setting(tmp_path / "one"))
    rig = play(disturbed, setting(tmp_path / "two"))
    assert [request.finish is not None for request in rig.ended] == [True]


@pytest.mark.parametrize("seconds", [5.5 * STEP, LENGTH])
def test_a_conversation_that_began_anew_beside_the_former_server_is_not_ended_by_it(
    seconds: float, tmp_path: Path
) -> None:
    async def former(rig: Rig) -> None:
        await begin(rig, CHAT, {"messages": USER}, seconds)

    async def beside() -> None:
        rig = build_rig(setting(tmp_path / "store", seed=9))  # other ids
        journal = rig.service.store.journal
        journal.begin_beside()
        running = asyncio.create_task(rig.engine.run())
        place, seen = await begin(rig, CHAT, {"messages": USER, "seed": 9}, 5.5 * STEP)
        await restore_streams(rig.service, ROUTES.planners)
        whole = await read(rig, place)
        assert whole.startswith(seen)
        assert whole.endswith(b"data: [DONE]\n\n")
        assert len(rig.ended) == 1
        assert await journal.ended(rig.service.unix_now()) == []
        assert await journal.running() == []
        rig.service.store.close()
        running.cancel()

    play_until_killed(former, setting(tmp_path / "store"))
    run_virtual(beside())
