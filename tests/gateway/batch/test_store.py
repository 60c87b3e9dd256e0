import asyncio
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.errors import StartupError
from gateway.errors import StoreFailed
from gateway.store.database import Database, StoreThread, store_meter
from gateway.store.store import open_default, open_named
from gateway.store.usage import StoreLimits

LIMITS = StoreLimits()


def test_a_store_file_can_be_open_in_one_server_only(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    first = open_named(path, LIMITS)
    with pytest.raises(StartupError, match="another server has it open"):
        open_named(path, LIMITS)
    first.close()
    open_named(path, LIMITS).close()


SUCCESSOR = """
import asyncio, sys
from pathlib import Path
from gateway.store.database import Database

def work(db):
    db.execute("INSERT INTO file_piece VALUES ('f', 0, 'x')")
    print("begun", flush=True)
    input()

database = Database(Path(sys.argv[1]), is_shared=True)
asyncio.run(database.write(work))
database.close()
"""


async def test_a_write_waits_for_one_of_the_server_that_succeeds_this_one(tmp_path: Path) -> None:
    database = Database(tmp_path / "store.sqlite")
    await database.share()
    successor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SUCCESSOR, str(database.path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert successor.stdout is not None
    assert await successor.stdout.readline() == b"begun\n"
    count, insert = "SELECT count(*) FROM file_piece", "INSERT INTO file_piece VALUES ('f', 1, 'x')"
    assert await database.read(lambda db: db.execute(count).fetchone()) == (0,)
    writing = asyncio.create_task(database.write(lambda db: db.execute(insert)))
    await asyncio.sleep(0)
    await successor.communicate(b"\n")
    await writing
    assert await database.read(lambda db: db.execute(count).fetchone()) == (2,)
    database.close()


def test_a_default_store_that_cannot_be_opened_is_replaced_by_memory(tmp_path: Path) -> None:
    path = tmp_path / "no directory" / "store.sqlite"
    path.parent.write_text("but a file")
    store = open_default(path, LIMITS)
    assert store.database.path is None
    store.close()


def test_the_second_server_with_a_state_directory_warns_once_and_names_the_flag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_default(tmp_path / "store.sqlite", LIMITS)
    second = open_default(tmp_path / "store.sqlite", LIMITS)
    assert second.database.path is None
    (record,) = caplog.records
    assert "another server has it open" in record.getMessage()
    assert "lost when this server ends: give it a file of its own with --store" in record.message
    first.close()
    second.close()


@pytest.mark.parametrize("content", [b"no database at all" * 100, None])
def test_a_file_that_is_no_store_is_rejected_and_not_changed(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "store.sqlite"
    if content is None:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 99")
        connection.close()
        content = path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(StartupError, match="cannot open the store"):
        open_named(path, LIMITS)
    assert path.read_bytes() == content


def test_the_store_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store.sqlite"
    open_named(path, LIMITS).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_pieces_of_an_unfinished_upload_are_removed(tmp_path: Path) -> None:
    path, count = tmp_path / "store.sqlite", "SELECT count(*) FROM file_piece"
    insert = "INSERT INTO file_piece VALUES ('f', 0, 'x')"
    for expected in (1, 0):
        database = Database(path)
        if expected:
            await database.write(lambda db: db.execute(insert))
        assert await database.read(lambda db: db.execute(count).fetchone()) == (expected,)
        database.close()


async def test_the_loop_never_touches_the_file() -> None:
    database, threads = Database(None), set()

    def work(db: sqlite3.Connection) -> None:
        threads.add(threading.current_thread())

    await asyncio.gather(*(database.write(work) for _ in range(20)))
    database.close()
    assert len(threads) == 1
    assert threading.current_thread() not in threads


async def test_work_that_raises_is_rolled_back() -> None:
    database = Database(None)

    def half(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO file_piece VALUES ('f', 0, 'x')")
        db.execute("INSERT INTO file_piece VALUES ('f', 0, 'x')")

    with pytest.raises(StoreFailed, match="UNIQUE"):
        await database.write(half)
    count = "SELECT count(*) FROM file_piece"
    assert await database.read(lambda db: db.execute(count).fetchone()) == (0,)
    database.close()


async def test_what_the_store_does_for_a_request_is_charged_to_it() -> None:
    thread, charged = StoreThread(), list[float]()
    await thread(lambda: sum(range(10_000)))
    assert not charged, "no request's"
    store_meter.set(charged.append)
    assert await thread(lambda: sum(range(100_000))) == 4_999_950_000
    with pytest.raises(ZeroDivisionError):
        await thread(lambda: sum(range(100_000)) // 0)
    thread.close()
    assert len(charged) == 2
    assert min(charged) > 0.0
