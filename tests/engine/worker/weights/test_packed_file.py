import errno
import os
import signal
from pathlib import Path

import pytest
import torch

from engine.errors import WorkerLost
from engine.files import beside_page_cache, write_all
from engine.worker.weights import packed_file
from engine.worker.weights.packed_cache import SUFFIX
from engine.worker.weights.packed_file import PackedEntry
from tests.engine.worker.weights.packed_files import (
    LARGE,
    add,
    cache_of,
    cached_files,
    flip,
    opened,
    until_published,
    value_of,
)

SIZE = 1 << 20


@pytest.fixture(autouse=True, params=["memory", "pages of the file"])
def packed_into(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a new file's weights are until it is written."""
    available = 0 if request.param == "pages of the file" else LARGE
    monkeypatch.setattr(packed_file, "available_bytes", lambda: available)


@pytest.mark.parametrize("at", [0, 3999, 4096, 4096 + 3999])
def test_every_byte_of_every_tensor_is_checked(tmp_path: Path, at: int) -> None:
    cache = cache_of(tmp_path, "weights")
    with opened(cache) as file:
        add(file, "one", 1.0)
        add(file, "other", 2.0)
        file.check()
    with opened(cache) as file:
        file.check()
    (path,) = cached_files(tmp_path / "cache")
    flip(path, at)
    with opened(cache) as file, pytest.raises(WorkerLost, match="packed again"):
        file.check()


def test_a_start_that_fails_leaves_no_file_behind(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, "weights")

    def start() -> None:
        with opened(cache) as file:
            add(file, "key", 1.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start()
    assert cached_files(tmp_path / "cache") == []


def test_two_starts_at_once_write_the_same_file(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, "weights")
    with opened(cache) as one, opened(cache) as other:
        for file in (one, other):
            add(file, "key", 3.0)
    with opened(cache) as later:
        assert value_of(later, "key") == 3.0
    assert len(cached_files(tmp_path / "cache")) == 1


def test_entries_keep_their_format_tensors_and_sizes(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, "weights")
    scales = torch.arange(6, dtype=torch.int32).view(2, 3)
    with opened(cache) as new:
        add(new, "one", 5.0)
        new.add("two", PackedEntry("int8", {"scale": scales}, {"inputs": 9}))
        assert new.find("one") is None  # it is in use already
    with opened(cache) as found:
        two = found.find("two")
        assert two is not None
        assert (two.format, two.sizes) == ("int8", {"inputs": 9})
        assert torch.equal(two.tensors["scale"], scales)
        assert value_of(found, "one") == 5.0
        assert found.find("three") is None


def test_a_file_of_another_layout_is_not_used(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, "weights")
    with opened(cache, "AVX2") as new:
        add(new, "key", 1.0)
    with opened(cache, "AVX-512") as other:
        assert other.find("key") is None
    with opened(cache, "AVX2") as same:
        assert value_of(same, "key") == 1.0


def test_the_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    caches = [cache_of(tmp_path, name, max_bytes=12_000) for name in "abc"]
    for number, cache in enumerate(caches[:2]):
        with opened(cache) as new:
            add(new, "key", number)
    folder = tmp_path / "cache"
    for age, path in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)):
        os.utime(path, (1000 + age, 1000 + age))
    with opened(caches[0]) as first:  # which makes the second one the least recently used
        assert value_of(first, "key") == 0
    with caches[2].open("layout", 4000) as new:
        add(new, "key", 2)
    until_published()
    found = []
    for cache in caches:
        with cache.open("layout", LARGE) as file:  # too large to be written
            found.append(value_of(file, "key"))
    assert found == [0, None, 2]


def test_the_temporary_file_of_a_dead_writer_is_removed(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, "weights")
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "left.new").write_bytes(b"half")
    with opened(cache) as one:
        names = [path.name for path in cached_files(folder)]
        assert "left.new" not in names
        assert len(names) == 1
        with opened(cache_of(tmp_path, "other")) as other:  # does not remove the first one's
            add(other, "key", 1.0)
        add(one, "key", 2.0)
    assert [path.suffix for path in cached_files(folder)] == [SUFFIX, SUFFIX]


def test_a_start_that_is_killed_while_it_packs_leaves_no_file_that_is_used(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, "weights")
    child = os.fork()
    if child == 0:
        with cache.open("layout", 1) as file:
            add(file, "key", 1.0)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (left,) = cached_files(tmp_path / "cache")
    with opened(cache) as file:
        assert value_of(file, "key") is None
        assert not left.exists()
        add(file, "key", 2.0)
    with opened(cache) as file:
        assert value_of(file, "key") == 2.0


def test_a_start_that_finds_its_own_file_removes_that_of_a_dead_writer_too(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, "weights")
    with opened(cache) as file:
        add(file, "key", 1.0)
    (tmp_path / "cache" / "left.new").write_bytes(b"half")
    with opened(cache) as file:
        assert value_of(file, "key") == 1.0
    assert [path.suffix for path in cached_files(tmp_path / "cache")] == [SUFFIX]


def test_packed_weights_are_written_beside_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened_with, open_file = tmp_path / "new", list[int](), os.open

    def noted(path: str, flags: int) -> int:
        opened_with.append(flags)
        if len(opened_with) > 1:
            raise OSError(errno.EINVAL, "no such flag here")
        return open_file(path, os.O_WRONLY)

    monkeypatch.setattr(os, "open", noted)
    with path.open("wb") as file:
        with beside_page_cache(str(path), file.fileno()) as direct:
            assert direct != file.fileno()
            write_all(direct, bytes(SIZE), 0)
        with beside_page_cache(str(path), file.fileno()) as direct:
            assert direct == file.fileno()
    assert opened_with == [os.O_WRONLY | os.O_DIRECT] * 2
    assert path.stat().st_size == SIZE
