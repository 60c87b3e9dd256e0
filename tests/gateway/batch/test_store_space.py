import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ResponseNotFound, StoreOutOfSpace
from gateway.store import database
from gateway.store.database import Database
from gateway.store.responses import Key, ResponseLimits
from gateway.store.store import open_store
from gateway.store.usage import StoreLimits
from tests.gateway.forms import a_form, batch_of, chat_lines, ended, started, upload, uploaded
from tests.gateway.rig import MODEL, Rig, Setting, play, played

FULL = 507


async def set_full(rig: Rig, *, full: bool) -> None:
    """Forbid the file to grow, or allow it again."""

    def limit(db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA max_page_count = {1 if full else 1 << 30}")  # at least its pages now

    await rig.service.store.database.read(limit)


async def status_of(rig: Rig, path: str, body: object) -> tuple[int, Any]:
    exchange = await rig.client.post(path, body)
    return exchange.status, exchange.json


async def upload_status(rig: Rig, num_bytes: int) -> int:
    return (await upload(rig.client, a_form(b"x" * num_bytes))).status


async def writable(rig: Rig) -> tuple[str, bool]:
    """What /ready and /metrics report."""
    exchange = await rig.client.get("/ready")
    assert exchange.status == 200
    metrics = (await rig.client.get("/metrics")).content.decode()
    return exchange.json["store"], "podway_store_writable 1.0\n" in metrics


def test_on_a_full_disk_reads_go_on_and_writes_are_rejected_before_the_work(tmp_path: Path) -> None:
    stored = {"model": MODEL, "input": "hi"}

    async def scene(rig: Rig) -> None:
        file_id = await uploaded(rig, b"some bytes")
        _, response = await status_of(rig, "/v1/responses", stored)
        assert await writable(rig) == ("writable", True)
        await set_full(rig, full=True)
        assert await upload_status(rig, 1 << 20) == FULL
        assert await writable(rig) == ("read-only", False)
        num_requests = len(rig.ended)
        status, reply = await status_of(rig, "/v1/responses", stored)
        assert (status, reply["error"]["code"]) == (FULL, "insufficient_storage")
        batch = {"endpoint": "/v1/responses", "completion_window": "24h", "input_file_id": file_id}
        assert (await status_of(rig, "/v1/batches", batch))[0] == FULL
        assert len(rig.ended) == num_requests, "nothing was generated"
        status, _ = await status_of(rig, "/v1/responses", stored | {"store": False})
        assert status == 200
        for path in (
            f"/v1/files/{file_id}/content",
            "/v1/files",
            f"/v1/responses/{response['id']}",
        ):
            assert (await rig.client.get(path)).status == 200
        await set_full(rig, full=False)
        await asyncio.sleep(database.RETRY_SECONDS + 1)
        assert (await status_of(rig, "/v1/responses", stored))[0] == 200
        assert await writable(rig) == ("writable", True)

    play(scene, Setting(store=tmp_path / "store.sqlite"))


def test_lines_of_a_batch_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        batch_id = await started(rig, chat_lines(40))
        await asyncio.sleep(4)
        await set_full(rig, full=True)
        rig.service.store.database._note_full("a test")
        await asyncio.sleep(4)
        num_requests = len(rig.ended)
        done = (await batch_of(rig, batch_id))["request_counts"]["completed"]
        assert 0 < done < 40
        await asyncio.sleep(5)
        assert len(rig.ended) == num_requests, "no line runs"
        await set_full(rig, full=False)
        batch = await ended(rig, batch_id)
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert len(rig.ended) == 40, "each line was generated once"

    play(scene, Setting(store=tmp_path / "store.sqlite", max_batch_size=2))


async def test_a_disk_with_little_space_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Database(tmp_path / "store.sqlite")
    await store.check_writable()
    monkeypatch.setattr(database, "MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(StoreOutOfSpace):
        await store.check_writable()
    assert not store.is_writable
    store.close()


async def test_after_a_restart_on_a_full_disk_the_store_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite"
    store = Database(path)
    await store.write(lambda db: db.execute("INSERT INTO file_piece VALUES ('f', 0, 'x')").rowcount)
    store.close()
    too_large = "INSERT INTO file_piece VALUES ('g', 0, zeroblob(1000000))"
    monkeypatch.setattr(database, "_CLEAN_UP", too_large)
    connect = sqlite3.connect

    def connect_to_a_full_disk(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)
        connection.execute("PRAGMA max_page_count = 1")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_a_full_disk)
    store = Database(path)
    assert await store.read(
        lambda db: db.execute("SELECT count(*) FROM file_piece").fetchone()
    ) == (1,)
    with pytest.raises(StoreOutOfSpace):
        await store.write(lambda db: db.execute(too_large).rowcount)
    store.close()


def test_a_store_of_the_former_version_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    old = database._TABLES.replace(",\n    num_bytes INTEGER NOT NULL DEFAULT 0", "")
    old = old.replace(
        "response_by_tenant ON response (tenant, used_at)", "response_by_use ON response (used_at)"
    )
    old = old.replace("CREATE INDEX file_by_tenant ON file (tenant);\n", "")
    with sqlite3.connect(path) as connection:
        connection.executescript(old + "PRAGMA user_version = 1;")
    connection.close()

    async def scene(rig: Rig) -> None:
        await ended(rig, await started(rig, chat_lines(2)))

    play(scene, Setting(store=path))


async def test_the_records_of_the_former_version_are_split_into_items(tmp_path: Path) -> None:
    path, many = (
        tmp_path / "store.sqlite",
        [{"id": f"msg_{i}", "text": f"é\n{i}"} for i in range(1500)],
    )
    items = [*many, {"id": "large", "text": "x" * 5_000_000}]
    whole = {"object": {"metadata": {}}, "output": [{"id": "msg_o"}]}
    with sqlite3.connect(path) as connection:
        tables = database._TABLES + database._STREAMS + database._CONVERSATIONS
        connection.executescript(tables + "PRAGMA user_version = 4;")
        record = {"id": "x", "tenant": "t", "response": whole, "items": items}
        data = json.dumps(record, ensure_ascii=False).encode()
        for table in ("response", "conversation"):
            for row in (("x", len(data), data), ("unreadable", 1, b"[" * 5000)):
                query = f"INSERT INTO {table} VALUES (NULL, ?, 't', ?, 100, 1, ?)"
                connection.execute(query, row)
    connection.close()
    store, key = open_store(path, StoreLimits()), Key("x", "t", 50)
    for stored in (store.responses, store.conversations):
        assert await stored.find(key) == whole
        page = await stored.page(key, "msg_1498", 9, ascending=True)
        assert [(item_id, json.loads(item)) for item_id, item in page] == [
            ("msg_1499", many[-1]),
            ("large", items[-1]),
        ]
        assert await stored.whole(key) == (whole, items)
        with pytest.raises(ResponseNotFound):
            await stored.find(key._replace(id="unreadable"))
    await store.conversations.remove(key, "large")
    assert await store.conversations.items(key) == many
    sums = "SELECT num_items, num_bytes FROM conversation"
    count, size = await store.database.read(lambda db: db.execute(sums).fetchone())
    assert count == 1500
    assert 30 * 1500 < size < 60 * 1500
    store.close()


def keyed(name: str) -> dict[str, str]:
    return {"x-api-key": name}


def test_the_limits_on_files_and_bytes_are_per_key() -> None:
    limits = StoreLimits(tenant_files=2, tenant_bytes=1000, total_bytes=1700)

    async def status(rig: Rig, key: str, num_bytes: int) -> tuple[int, str]:
        exchange = await upload(rig.client, a_form(b"x" * num_bytes), keyed(key))
        return exchange.status, exchange.json.get("error", {}).get("code", "")

    async def scene(rig: Rig) -> None:
        full, out_of_space = (413, "storage_full"), (FULL, "insufficient_storage")
        assert await status(rig, "a", 600) == (200, "")
        assert await status(rig, "a", 600) == full
        assert await status(rig, "a", 300) == (200, "")
        assert await status(rig, "a", 1) == full, "two files"
        assert await status(rig, "b", 900) == out_of_space, "of the whole store"
        assert await status(rig, "b", 700) == (200, "")

    play(scene, Setting(keys=("a", "b"), files=limits))


def test_batches_count_against_the_bytes_of_their_key() -> None:
    lines = chat_lines(8)
    limits = StoreLimits(tenant_bytes=int(1.5 * len(lines)))

    async def scene(rig: Rig) -> None:
        file_id = await uploaded(rig, lines)
        body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        status, reply = await status_of(rig, "/v1/batches", body | {"input_file_id": file_id})
        assert (status, reply["error"]["code"]) == (413, "storage_full")

    play(scene, Setting(files=limits))


def test_responses_of_one_key_never_evict_those_of_another() -> None:
    async def respond(rig: Rig, key: str) -> str:
        body = {"model": MODEL, "input": "hi"}
        return str((await rig.client.post("/v1/responses", body, keyed(key))).json["id"])

    async def scene(rig: Rig) -> None:
        kept = await respond(rig, "a")
        others = [await respond(rig, "b") for _ in range(4)]
        found = []
        for key, response_id in (("a", kept), *(("b", each) for each in others)):
            exchange = await rig.client.get(f"/v1/responses/{response_id}", keyed(key))
            found.append(exchange.status)
        assert found == [200, 404, 404, 200, 200]

    play(scene, Setting(keys=("a", "b"), responses=ResponseLimits(count=2)))


@played()
async def test_an_empty_file_is_rejected(rig: Rig) -> None:
    exchange = await upload(rig.client, a_form(b""))
    assert (exchange.status, exchange.json["error"]["param"]) == (400, "file")
