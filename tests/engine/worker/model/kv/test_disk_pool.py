import os
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import StartupError
from engine.step import BlockMove, Direction, Page, PageKind, Tier
from engine.worker.cpu.transfers import HostTransfers
from engine.worker.model.kv import disk_pool
from engine.worker.model.kv.disk_pool import HEADER, DiskFiles, folder_of
from engine.worker.model.kv.host_pool import HostPool
from engine.worker.model.kv.kv_tensors import allocate, bytes_per_block
from engine.worker.model.kv.tiered_pool import StoredTensors, TieredPool
from engine.worker.ports import KVTensors
from engine.worker.ports.shapes import ModelShape

SHAPE = ModelShape(2, 4, 2, 8, 32, 64, 1, 100, 64)
BLOCK = 4
A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


def content(seed: int, size: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[DiskFiles]:
    found = DiskFiles(tmp_path, 4, 100)
    yield found
    found.close()


def test_a_copy_is_read_while_it_is_queued_and_when_it_is_written(files: DiskFiles) -> None:
    files.write(2, A, content(1, 100))
    for _ in range(2):
        (found,) = files.read([2], [A])
        assert found is not None
        assert bytes(found) == content(1, 100).tobytes()
        files.wait()
    assert files.read([2, 1], [B, A]) == [None, None]


def test_a_slot_that_is_written_again_has_the_last_content(files: DiskFiles) -> None:
    for number, name in enumerate((A, B, C)):
        files.write(0, name, content(number, 100))
    files.wait()
    assert files.read([0, 0], [A, B]) == [None, None]
    (found,) = files.read([0], [C])
    assert found is not None
    assert bytes(found) == content(2, 100).tobytes()


def test_copies_outlive_the_process_and_a_smaller_setting_keeps_those_of_the_first_slots(
    tmp_path: Path,
) -> None:
    first = DiskFiles(tmp_path, 4, 100)
    first.write(1, A, content(1, 100))
    first.write(3, B, content(2, 100))
    first.close()
    for num_slots, hashes in ((4, bytes(16) + A + bytes(16) + B), (2, bytes(16) + A)):
        again = DiskFiles(tmp_path, num_slots, 100)
        assert again.hashes() == hashes
        assert (tmp_path / "blocks").stat().st_size == num_slots * 100
        again.close()


@pytest.mark.parametrize("torn", ["content", "header", "short"])
def test_a_torn_copy_is_never_read(tmp_path: Path, torn: str) -> None:
    first = DiskFiles(tmp_path, 4, 100)
    first.write(1, A, content(1, 100))
    first.close()
    if torn == "short":
        os.truncate(tmp_path / "blocks", 150)
        os.truncate(tmp_path / "headers", HEADER.itemsize * 2)
    else:
        path = tmp_path / ("blocks" if torn == "content" else "headers")
        data = bytearray(path.read_bytes())
        data[150 if torn == "content" else HEADER.itemsize + 17] ^= 1
        path.write_bytes(data)
    again = DiskFiles(tmp_path, 4, 100)
    assert again.read([1], [A]) == [None]
    again.close()


def test_a_header_is_cleared_before_its_slot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process were killed between two writes."""
    first = DiskFiles(tmp_path, 4, 100)
    first.write(1, A, content(1, 100))
    first.wait()
    written: list[int] = []
    real = os.pwrite

    def once(descriptor: int, data: bytes, at: int) -> int:
        written.append(len(data))
        if len(written) > 1:
            raise OSError(5, "Input/output error")
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", once)
    first.write(1, B, content(2, 100))
    first.wait()
    monkeypatch.undo()
    assert written == [HEADER.itemsize, 100]
    assert first.read([1, 1], [A, B]) == [None, None]
    first.close()


def test_a_full_disk_ends_writing_and_is_logged_once(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files.write(0, A, content(1, 100))
    files.wait()

    queued = threading.Event()  # several copies are, when the first of them fails

    def full(*_: object) -> int:
        queued.wait()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for slot in (1, 2, 3):
        files.write(slot, B, content(2, 100))
    queued.set()
    files.wait()
    files.write(2, B, content(2, 100))
    files.wait()
    assert [record.message for record in caplog.records] == [
        "--disk-kv: KV blocks are no longer written to the disk: No space left on device"
    ]
    (found,) = files.read([0], [A])
    assert found is not None


def test_a_disk_that_does_not_keep_up_gets_no_more_copies(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_pool, "MAX_QUEUED_BYTES", -1)
    files.write(0, A, content(1, 100))
    files.wait()
    assert files.read([0], [A]) == [None]


def test_a_successor_shares_the_folder_and_has_it_once_the_server_before_has_ended(
    tmp_path: Path,
) -> None:
    former = DiskFiles(tmp_path, 4, 100)
    own = DiskFiles(tmp_path, 4, 100, is_shared=True)
    former.write(0, A, content(1, 100))
    former.write(1, A, content(1, 100))
    former.wait()
    own.write(1, B, content(2, 100))
    own.wait()
    for files in (former, own):
        found, lost, other = files.read([0, 1, 1], [A, A, B])
        assert found is not None
        assert lost is None
        assert other is not None
        assert other.tobytes() == content(2, 100).tobytes()
    (waiting,) = [each for each in threading.enumerate() if each.name == "disk-kv-lock"]
    former.close()
    waiting.join()
    with pytest.raises(StartupError, match="is in use by another server"):
        DiskFiles(tmp_path, 4, 100)
    own.close()


def test_a_folder_that_cannot_be_written_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"--disk-kv .*file/x: Not a directory"):
        DiskFiles(tmp_path / "file" / "x", 4, 100)


def test_a_folder_is_used_by_one_server_at_a_time_and_another_changes_no_file(
    tmp_path: Path, files: DiskFiles
) -> None:
    with pytest.raises(StartupError, match="is in use by another server"):
        DiskFiles(tmp_path, 1, 100)
    assert (tmp_path / "blocks").stat().st_size == 400


def test_folders_that_are_long_unused_are_removed_unless_a_server_has_them(tmp_path: Path) -> None:
    names = ("used", "unused", "locked", "recent")
    folders = {name: folder_of(tmp_path, name) for name in names}
    opened = {name: DiskFiles(folder, 2, 100) for name, folder in folders.items()}
    for name in names[:3]:
        os.utime(folders[name] / "headers", (0, 0))
    for name in ("used", "unused", "recent"):
        opened[name].close()
    other = tmp_path / "not-ours"
    other.mkdir()
    now = (folders["recent"] / "headers").stat().st_mtime
    disk_pool.remove_unused(tmp_path, folders["used"], now)
    left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {"not-ours", *(folders[name].name for name in ("used", "locked", "recent"))}
    opened["locked"].close()


def filled(num_blocks: int, dtype: torch.dtype) -> KVTensors:
    cache = allocate(SHAPE, 2, num_blocks, BLOCK, dtype)
    torch.manual_seed(0)
    for tensor in cache.in_memory_order():
        tensor.copy_(torch.randint(-99, 99, tensor.shape).to(tensor.dtype))
    return cache


def move(
    direction: Direction, device: list[int], slots: list[int], hashes: list[bytes]
) -> BlockMove:
    tables = array("i", device).tobytes(), array("i", slots).tobytes()
    return BlockMove(direction, *tables, True, Tier.DISK, b"".join(hashes))


def tiered(device: KVTensors, dtype: torch.dtype, files: DiskFiles) -> TieredPool:
    """A disk tier below a host tier without blocks."""
    host = HostPool(device, allocate(SHAPE, 2, 0, BLOCK, dtype))
    stored = StoredTensors(device.in_memory_order(), device.num_blocks, files, HostTransfers())
    return TieredPool(host, {(Tier.DISK, PageKind.BLOCK): stored})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_blocks_come_back_bit_by_bit_and_the_missing_ones_are_named(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    device = filled(6, dtype)
    before = [tensor.clone() for tensor in device.in_memory_order()]
    files = DiskFiles(tmp_path, 4, bytes_per_block(SHAPE, 2, BLOCK, dtype))
    pool = tiered(device, dtype, files)
    assert pool.move([move(Direction.OUT, [1, 4], [3, 0], [A, B])]).wait() == ()
    back = pool.move([move(Direction.IN, [5, 2, 0], [0, 1, 3], [B, C, A])])
    assert back.wait() == (Page(PageKind.BLOCK, 2),)
    for tensor, old in zip(device.in_memory_order(), before, strict=True):
        assert torch.equal(tensor[5], old[4])
        assert torch.equal(tensor[0], old[1])
        assert torch.equal(tensor[2], old[2])
    files.close()


def test_moves_out_of_range_are_rejected(tmp_path: Path) -> None:
    device = filled(2, torch.float32)
    files = DiskFiles(tmp_path, 2, bytes_per_block(SHAPE, 2, BLOCK, torch.float32))
    pool = tiered(device, torch.float32, files)
    for wrong in (
        move(Direction.OUT, [2], [0], [A]),
        move(Direction.OUT, [0], [2], [A]),
        move(Direction.IN, [0], [0], []),
    ):
        with pytest.raises(ValueError, match=r"range|slots"):
            pool.move([wrong])
    files.close()
