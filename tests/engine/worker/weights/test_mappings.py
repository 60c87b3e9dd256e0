"""What a worker has read of its checkpoint's file leaves its memory, and nothing else does."""

import mmap
from pathlib import Path

import pytest
import torch

from engine.transport.process_memory import SMAPS
from engine.worker.weights.mappings import drop_pages
from engine.worker.weights.packed_file import address_of, anonymous
from engine.worker.weights.source import StoredRows
from tests.engine.transport.process_memory import resident
from tests.engine.worker.process.driving import Driver, load_worker
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
    drop_pages([path])
    assert resident(path) == (SIZE if is_written else 0)
    assert resident(other) == SIZE
    assert maps[0][0] == ord("x")
    assert maps[0][5] == (1 if is_written else ord("x"))
    for mapped in maps:
        mapped.close()


def test_pages_of_an_embedding_are_dropped_after_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.weights.source.MAX_ROWS", 8)
    rows = torch.arange(512.0)[:, None].expand(512, 1024)
    path = tmp_path / "rows"
    path.write_bytes(rows.numpy().tobytes())
    stored = torch.from_file(str(path), shared=False, size=rows.numel(), dtype=torch.float32)
    lookup = StoredRows(stored.view(rows.shape), torch.float32, [path])
    for first in range(0, 500, 40):
        for ids, is_kept in ((range(first, first + 4), True), (range(first, first + 8), False)):
            assert torch.equal(lookup(torch.tensor(ids)), rows[ids.start : ids.stop])
            assert (resident(path) > 0) == is_kept


def test_a_loaded_worker_keeps_few_file_pages_and_computes_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    worker = load_worker(tmp_path, attention="cpu")
    said = Driver(worker).generate(0, [1, 2, 3], 5)
    drop_pages([path])
    assert resident(path) == 0
    assert Driver(worker).generate(0, [1, 2, 3], 5) == said
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
