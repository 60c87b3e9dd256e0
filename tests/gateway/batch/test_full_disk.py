import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.store import database
from tests.gateway.forms import a_form, upload, uploaded
from tests.gateway.rig import MODEL, Rig, Setting, play

FULL = 507
CONTENT = b"some bytes"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB in memory."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all free space."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 9, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    return path


async def statuses(rig: Rig, file_id: str) -> tuple[int, int, int, str]:
    """Of an upload, of a response to be stored and of a file's content; the store's state."""
    uploaded = (await upload(rig.client, a_form(b"x" * (1 << 19)))).status
    generated = (await rig.client.post("/v1/responses", {"model": MODEL, "input": "hi"})).status
    exchange = await rig.client.get(f"/v1/files/{file_id}/content")
    assert (exchange.content == CONTENT) == (exchange.status == 200)
    read = exchange.status
    return uploaded, generated, read, (await rig.client.get("/ready")).json["store"]


def test_a_full_file_system_stops_writes_only(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MIN_FREE_BYTES", 0)  # so that a write meets the full disk
    store = small_disk / "store.sqlite"
    file_ids: list[str] = []

    async def until_it_is_full(rig: Rig) -> None:
        file_ids.append(await uploaded(rig, CONTENT))
        fill(small_disk)
        assert await statuses(rig, file_ids[0]) == (FULL, FULL, 200, "read-only")

    async def after_a_restart(rig: Rig) -> None:
        assert await statuses(rig, file_ids[0]) == (FULL, FULL, 200, "read-only")
        (small_disk / "filler").unlink()
        await asyncio.sleep(database.RETRY_SECONDS + 1)
        assert await statuses(rig, file_ids[0]) == (200, 200, 200, "writable")

    play(until_it_is_full, Setting(store=store, seed=1))
    play(after_a_restart, Setting(store=store, seed=2))  # a seed gives the same file ids
