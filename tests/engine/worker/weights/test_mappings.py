import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.transport.process_memory import SMAPS
from engine.worker.weights.checkpoint_files import SafetensorsFiles
from engine.worker.weights.formats.int8 import Int8Weight
from engine.worker.weights.mappings import PAGE, CachedPages, drop_pages
from engine.worker.weights.packed_file import address_of, anonymous
from engine.worker.weights.stored_rows import StoredRows
from tests.engine.transport.process_memory import (
    cached_pages,
    frees_cached_pages,
    resident,
    write_to_disk,
)
from tests.models.checkpoints import make_checkpoint

SIZE = 1 << 20

pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells")


@pytest.mark.parametrize("is_written", [False, True])
def test_pages_are_dropped_unless_they_were_written_to(tmp_path: Path, is_written: bool) -> None:
    path, other = tmp_path / "a file", tmp_path / "other"
    for each in (path, other):
        each.write_bytes(b"x" * SIZE)
    maps = []
    for each in (path, other):
        with each.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_COPY))
        assert sum(maps[-1][::4096]) > 0
    if is_written:
        maps[0][5] = 1
    drop_pages([torch.frombuffer(maps[0], dtype=torch.uint8)])
    assert resident(path) == (SIZE if is_written else 0)
    assert resident(other) == SIZE
    assert maps[0][0] == ord("x")
    assert maps[0][5] == (1 if is_written else ord("x"))
    for mapped in maps:
        mapped.close()


@pytest.mark.parametrize("is_part", [False, True])
def test_rows_of_an_embedding_are_read_without_mapping_its_pages(
    tmp_path: Path, is_part: bool
) -> None:
    rows = torch.arange(512.0 * 1024).view(512, 1024)
    path = tmp_path / "rows"
    path.write_bytes(bytes(4096) + rows.numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=1024 + rows.numel())
    stored = mapped[1024:].view(rows.shape)
    if is_part:  # a share of the vocabulary and of the columns
        stored, rows = stored[100:400, 256:512], rows[100:400, 256:512]
    lookup = StoredRows(stored, torch.float32, [path])
    assert resident(path) == 0
    ids = torch.tensor([0, 299, 7, 7, 150])
    assert torch.equal(lookup(ids), rows[ids])
    assert resident(path) == 0
    with pytest.raises(IndexError, match="row 512 of"):
        lookup(torch.tensor([512]))


def test_all_rows_are_requested_from_the_disk_before_the_first_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.arange(64.0 * 1024).view(64, 1024)
    path = tmp_path / "rows"
    path.write_bytes(rows.numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=rows.numel()).view(rows.shape)
    lookup = StoredRows(mapped, torch.float32, [path])
    calls: list[tuple[str, int]] = []
    read, advise = os.preadv, os.posix_fadvise

    def noted_read(file: int, buffers: Sequence[memoryview], at: int) -> int:
        calls.append(("read", at))
        return read(file, buffers, at)

    def noted_advice(file: int, at: int, size: int, advice: int) -> None:
        calls.append(("advise", at))
        assert (size, advice) == (4096, os.POSIX_FADV_WILLNEED)
        advise(file, at, size, advice)

    monkeypatch.setattr(os, "preadv", noted_read)
    monkeypatch.setattr(os, "posix_fadvise", noted_advice)
    ids = [5, 63, 0]
    assert torch.equal(lookup(torch.tensor(ids)), rows[ids])
    places = [4096 * row for row in ids]
    assert calls == [(kind, at) for kind in ("advise", "read") for at in places]


def test_rows_of_a_file_that_was_replaced_are_those_of_the_mapped_one(tmp_path: Path) -> None:
    rows = torch.arange(2048.0).view(8, 256)
    path = tmp_path / "rows"
    path.write_bytes(rows.numpy().tobytes())
    stored = torch.from_file(str(path), shared=False, size=rows.numel()).view(rows.shape)
    (tmp_path / "new").write_bytes(bytes(rows.nbytes))
    (tmp_path / "new").replace(path)
    lookup = StoredRows(stored, torch.float32, [path])
    assert torch.equal(lookup(torch.tensor([3])), rows[[3]])


def test_another_mapping_of_the_file_is_left_alone(tmp_path: Path) -> None:
    """Its owner may end it meanwhile, and the addresses may be those of other memory then."""
    path = tmp_path / "a file"
    path.write_bytes(b"x" * SIZE)
    ours, other = (torch.from_file(str(path), size=SIZE, dtype=torch.uint8) for _ in range(2))
    assert ours.sum() == other.sum() > 0
    drop_pages([ours])
    assert resident(path) == SIZE
    drop_pages([other])
    assert resident(path) == 0


def test_the_cache_of_whole_pages_is_freed_and_they_read_the_same_again(tmp_path: Path) -> None:
    """A page of two weights is freed with the second one, whatever their order."""
    if not frees_cached_pages(tmp_path):
        pytest.skip("the file system frees no single pages")
    path, header = tmp_path / "a file", 100
    numbers = torch.arange(6 * PAGE, dtype=torch.int64).to(torch.int8)
    write_to_disk(path, bytes(header) + numbers.numpy().tobytes())
    mapped = torch.from_file(str(path), size=header + len(numbers), dtype=torch.int8)
    values = mapped[header:].view(6, PAGE)
    pages, before = CachedPages([path]), cached_pages(path)
    others = CachedPages([path], frees=False)
    others.free(others.read(values))
    assert resident(path) > len(numbers) - PAGE
    assert cached_pages(path) == before
    assert pages.read(values[1:3].t()) == [] == pages.read(torch.ones(PAGE))
    freed = set[int]()
    for rows, more in ((slice(3, 5), {4}), (slice(1, 2), set()), (slice(2, 3), {2, 3})):
        weight = Int8Weight(values[rows], torch.ones(2))  # scales are not in the file
        pages.free(pages.read(weight))
        freed |= more
        assert before - cached_pages(path) == freed
    runs = pages.read(values)
    path.unlink()
    pages.free(runs)
    assert torch.equal(values.flatten(), numbers)


def test_what_was_read_of_a_checkpoint_is_dropped_and_reads_the_same_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    files = SafetensorsFiles(tmp_path)
    before = {name: files.read(name, ()) for name in files.names}
    copies = {name: tensor.clone() for name, tensor in before.items() if isinstance(tensor, Tensor)}
    assert resident(path) > 0
    files.drop_pages()
    assert resident(path) == 0
    for name, copy in copies.items():
        again = files.read(name, ())
        assert isinstance(again, Tensor)
        assert torch.equal(again, copy)
    assert resident(path) > 0


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)
def test_huge_pages_are_requested_for_anonymous_memory() -> None:
    mapping = anonymous(3 * SIZE)
    first = address_of(mapping)
    is_ours, flags = False, ""
    for line in SMAPS.read_text().splitlines():
        name, *words = line.split()
        if "-" in name and not name.endswith(":"):
            start, end = (int(each, 16) for each in name.split("-"))
            is_ours = start <= first < end
        elif name == "VmFlags:" and is_ours:
            flags = " ".join(words)
    assert "hg" in flags.split()
