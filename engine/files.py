"""Files that one process writes and others read only once they are complete."""

import fcntl
import hashlib
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEW_SUFFIX = ".new"  # ends the name of a file that is being written
WRITE_BYTES = 64 << 20  # bytes that are written at a time


def split_files(path: Path) -> list[Path]:
    """The file, or all files of a GGUF model of which it is the first, as llama-gguf-split names
    them: `NAME-00001-of-00003.gguf`."""
    first = re.fullmatch(r"(.*)-00001-of-(\d{5})(\.gguf)", path.name)
    if first is None:
        return [path]
    name, count, suffix = first.groups()
    return [path.with_name(f"{name}-{n:05}-of-{count}{suffix}") for n in range(1, 1 + int(count))]


def new_file(folder: Path) -> tuple[int, str]:
    """The descriptor and the temporary name of a new file, which is locked while it has a writer.
    Raises `OSError`."""
    file, name = tempfile.mkstemp(dir=folder, suffix=NEW_SUFFIX)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file, name


@contextmanager
def beside_page_cache(path: str, file: int) -> Iterator[int]:
    """A descriptor of an open file whose writes, of whole pages, go from memory to the disk; the
    file's own where the system has none.

    Copies in the page cache would take a core's time from others, and memory from other files.
    """
    try:
        direct = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system in memory
        yield file
        return
    try:
        yield direct
    finally:
        os.close(direct)


def write_all(file: int, content: bytes | mmap.mmap, offset: int) -> None:
    """Write all of it there; a call of the system writes less than 2 GiB. Raises `OSError`."""
    with memoryview(content) as left:
        written = 0
        while written < len(left):
            written += os.pwrite(file, left[written : written + WRITE_BYTES], offset + written)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically, and make its folder if there is none. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    descriptor, temporary = new_file(path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files whose writers have died."""
    for path in folder.glob(f"*{NEW_SUFFIX}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error if there is a writer
            path.unlink()


def source_digest(*folders: Path) -> str:
    """A digest of all Python sources in these folders, by whose version a file is valid."""
    hashed = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]
