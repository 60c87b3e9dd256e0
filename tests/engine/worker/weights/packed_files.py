"""Files of packed weights for the tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.worker.weights.packed_cache import PackedCache
from engine.worker.weights.packed_file import SYNC_THREAD, PackedEntry, PackedFile

LARGE = 1 << 30


def until_published() -> None:
    """Wait for the threads that make new files visible."""
    for thread in threading.enumerate():
        if thread.name == SYNC_THREAD:
            thread.join()


def cached_files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


@contextmanager
def opened(cache: PackedCache, layout: str = "layout") -> Iterator[PackedFile]:
    with cache.open(layout, 1) as file:
        yield file
    until_published()


def cache_of(tmp_path: Path, *names: str, max_bytes: int = LARGE) -> PackedCache:
    """A cache for files with these names, which exist."""
    files = [tmp_path / name for name in names]
    for path in files:
        path.touch()
    return PackedCache(str(tmp_path / "cache"), max_bytes, files)


def add(file: PackedFile, key: str, value: float) -> None:
    """Add an entry of one tensor, packed in place as linears do."""
    packed = torch.frombuffer(file.grow(4 * 1000), dtype=torch.float32)[:1000]
    packed.fill_(value)
    file.add(key, PackedEntry("float32", {"packed": packed}, {"outputs": 7}))


def value_of(file: PackedFile, key: str) -> float | None:
    found = file.find(key)
    return None if found is None else float(found.tensors["packed"][999])


def flip(path: Path, at: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
