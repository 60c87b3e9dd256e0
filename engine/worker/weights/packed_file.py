"""The file format of packed weights, read by mapping it and written in place.

    | tensors, each at the start of a page | header: JSON | footer: 64 bytes |

A new file has a temporary name until its data has reached the disk; a thread waits for that while
the worker serves, and then renames it. So any number of workers may write the same file at once,
and one that has its name is complete. Weights that fit are packed in anonymous memory, of which
that thread writes the file: a start that writes to a file's pages waits for the disk as soon as a
fifth of the memory is not yet written.

The header has a checksum of each tensor, and the footer one of the header. The thread that reads a
mapped file ahead computes those of the tensors, while the start goes on, and the worker answers no
step before it has (`PackedFile.check`). Experts that stay on the disk are not read ahead, and not
checked. XXH3 takes 0.1 to 0.2 s per GB, the read from the disk 1.4 s (one core of Zen 5, NVMe);
zlib's CRC-32 would take 0.8 s and BLAKE2b 2.6 s.
"""

import ctypes
import hashlib
import json
import logging
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from engine.errors import WorkerLost
from engine.files import beside_page_cache, new_file, write_all
from engine.transport.process_memory import available_bytes, populate
from engine.worker.weights.mappings import CachedPages

logger = logging.getLogger(__name__)

MAGIC = b"podwaypk"
FOOTER = struct.Struct("<8sQQQ32s")  # magic; header at, header bytes, file bytes; SHA-256
SYNC_THREAD = "podway-packed-cache"
READ_THREAD = "podway-read-ahead"
READ_BYTES = 64 << 20  # bytes that are read ahead at a time
MAX_SHARE = 0.75  # KV, and what is not yet written, need memory too
SLAB_BYTES = 64 << 20  # the size of a mapping of anonymous memory
PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
PAGE = mmap.ALLOCATIONGRANULARITY


class PackedEntry(NamedTuple):
    """The packed weights of one linear: the format they are in, tensors, and sizes.

    Not every step reads them if `is_sparse`: they belong to one of several experts.
    """

    format: str
    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    is_sparse: bool = False


def anonymous(num_bytes: int) -> mmap.mmap:
    """A new mapping of so many bytes, in huge pages if the system allows it.

    Weights are read from beginning to end in every step: two cores of Zen 5 read 61 GB/s in pages
    of 4 KiB and 68 GB/s in huge ones. Pages of a mapped file are as fast as huge pages there.
    """
    if sys.platform != "linux":
        return mmap.mmap(-1, num_bytes)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class PackedFile:
    """A cache file that is open: read, or written, or neither.

    This class is neither: it finds nothing, keeps nothing, and its memory is anonymous.
    """

    num_bytes = 0  # the size of the file
    slab_bytes = SLAB_BYTES  # at least so many are requested from `grow`; 0: a tensor's own
    checkpoint = CachedPages()  # what no start needs again once it is packed

    @property
    def resident_bytes(self) -> int:
        """Bytes of the file's pages, which the system counts as available memory, that stay in
        memory while the worker runs."""
        return self.num_bytes

    def find(self, key: str) -> PackedEntry | None:
        """The entry of this key in a file of an earlier start."""
        return None

    def grow(self, num_bytes: int) -> mmap.mmap:
        """Memory to pack into."""
        return anonymous(num_bytes)

    def add(self, key: str, entry: PackedEntry) -> None:
        """Keep an entry for the next start. Its large tensors lie in memory from `grow`."""

    def check(self) -> None:
        """Wait until the tensors of a mapped file that stay in memory have been compared with their
        checksums; `WorkerLost` if one differs."""


class MappedFile(PackedFile):
    """A complete file of an earlier start, mapped so that it cannot be written to."""

    def __init__(
        self, path: Path, mapping: mmap.mmap, entries: Mapping[str, "_EntryHeader"]
    ) -> None:
        """Start to read the tensors that stay in memory."""
        self._path, self._mapping, self._entries = path, mapping, entries
        self.num_bytes = len(mapping)
        self._resident = resident_tensors(entries.values(), len(mapping), available_bytes())
        self._damage = ""
        self._reader = threading.Thread(target=self._read, name=READ_THREAD, daemon=True)
        self._reader.start()

    @property
    def resident_bytes(self) -> int:
        return sum(len(tensor.run) for tensor in self._resident)

    def check(self) -> None:
        self._reader.join()
        if self._damage:
            raise WorkerLost(self._damage)

    def _read(self) -> None:
        """Read the tensors and compare them with their checksums. A damaged file is removed, so the
        next start packs the weights again."""
        start = address_of(self._mapping)
        with memoryview(self._mapping) as content:
            for tensor in self._resident:
                digest = xxhash.xxh3_128()
                for at in range(tensor.run.start, tensor.run.stop, READ_BYTES):
                    size = min(READ_BYTES, tensor.run.stop - at)
                    populate(range(start + at, start + at + size))
                    digest.update(content[at : at + size])
                if digest.hexdigest() != tensor.digest:
                    self._damage = (
                        f"the packed weights in {self._path} are damaged at byte "
                        f"{tensor.run.start:,} or behind it, so they are packed again"
                    )
                    self._path.unlink(missing_ok=True)
                    return

    @classmethod
    def open(cls, path: Path, facts: object) -> "MappedFile | None":
        """None if there is no file, or, with a line in the log, no usable one."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                entries = _read_entries(file.fileno(), size, facts)
                prot = mmap.PROT_READ | mmap.PROT_WRITE  # torch cannot use read-only buffers
                mapping = mmap.mmap(file.fileno(), size, flags=PRIVATE, prot=prot)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            logger.warning(
                "the packed weights in %s cannot be used, so they are packed again: %s", path, error
            )
            return None
        protect(mapping)
        with suppress(OSError):
            os.utime(path)  # the least recently used file is removed first
        return cls(path, mapping, entries)

    def find(self, key: str) -> PackedEntry | None:
        found = self._entries.get(key)
        if found is None:
            return None
        tensors = {name: self._tensor(place) for name, place in found.tensors.items()}
        return PackedEntry(found.format, tensors, found.sizes, found.is_sparse)

    def _tensor(self, stored: "_StoredTensor") -> Tensor:
        kind: torch.dtype = getattr(torch, stored.dtype)
        count, offset = prod(stored.shape), stored.run.start
        tensor = torch.frombuffer(self._mapping, dtype=kind, count=count, offset=offset)
        return tensor.view(stored.shape)


class _StoredTensor(NamedTuple):
    """A tensor in a file; `digest` is its checksum in hexadecimal digits."""

    dtype: str
    shape: list[int]
    offset: int
    digest: str = ""

    @property
    def run(self) -> range:
        """Its bytes in the file."""
        size: int = getattr(torch, self.dtype).itemsize * prod(self.shape)
        return range(self.offset, self.offset + size)


class _EntryHeader(NamedTuple):
    """A `PackedEntry` in a header."""

    format: str
    tensors: Mapping[str, _StoredTensor]
    sizes: Mapping[str, int]
    is_sparse: bool = False

    @classmethod
    def read(
        cls,
        format: str,
        tensors: Mapping[str, tuple[str, list[int], int, str]],
        sizes: Mapping[str, int],
        is_sparse: bool,
    ) -> "_EntryHeader":
        """The entry from its JSON form, a list of its fields."""
        stored = {name: _StoredTensor(*each) for name, each in tensors.items()}
        return cls(format, stored, sizes, is_sparse)


class NewFile(PackedFile):
    """A file under a temporary name, which grows with the weights that are packed: in memory until
    all are if `expected_bytes` fit, else in pages of the file."""

    slab_bytes = 0

    def __init__(
        self, folder: Path, facts: object, expected_bytes: int, pages: CachedPages
    ) -> None:
        self._file, self._temporary = new_file(folder)
        self.checkpoint = pages
        self._facts = facts
        self._is_in_memory = expected_bytes <= MAX_SHARE * available_bytes()
        self._entries: dict[str, _EntryHeader] = {}
        self._mappings: dict[int, tuple[int, mmap.mmap]] = {}  # by address: offset in the file
        self.num_bytes = 0
        self._is_abandoned = False

    def grow(self, num_bytes: int) -> mmap.mmap:
        if self._is_abandoned:
            return super().grow(num_bytes)
        start, size = self.num_bytes, -(-num_bytes // PAGE) * PAGE
        try:
            os.posix_fallocate(self._file, start, size)  # a full disk is an error here, not later
            mapping = (
                anonymous(size) if self._is_in_memory else mmap.mmap(self._file, size, offset=start)
            )
        except OSError as error:
            self._abandon(error)
            return super().grow(num_bytes)
        self.num_bytes += size
        self._mappings[address_of(mapping)] = (start, mapping)
        return mapping

    @property
    def resident_bytes(self) -> int:
        if self._is_in_memory:
            return 0
        tensors = resident_tensors(self._entries.values(), self.num_bytes, available_bytes())
        return sum(len(tensor.run) for tensor in tensors)

    def add(self, key: str, entry: PackedEntry) -> None:
        places = {name: self._place(tensor) for name, tensor in entry.tensors.items()}
        self._entries[key] = _EntryHeader(entry.format, places, entry.sizes, entry.is_sparse)

    def _place(self, tensor: Tensor) -> _StoredTensor:
        """Where the tensor is in the file; one that lies elsewhere is copied into it."""
        found = self._mappings.get(tensor.data_ptr())
        if found is None and not self._is_abandoned:
            copy = torch.frombuffer(self.grow(max(1, tensor.nbytes)), dtype=torch.uint8)
            copy[: tensor.nbytes] = tensor.contiguous().view(torch.uint8).flatten()
            found = self._mappings.get(copy.data_ptr())
        start = 0 if found is None else found[0]  # 0 is never read: the file is abandoned
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _StoredTensor(dtype, list(tensor.shape), start)

    def finish(self, path: Path) -> None:
        """A thread writes the header, and makes the file visible once its data is on the disk."""
        if self._is_abandoned:
            return
        for _, mapping in self._mappings.values():
            protect(mapping)
        arguments = self._file, self._temporary, path
        self._file, self._temporary = -1, ""
        threading.Thread(
            target=self._publish, args=arguments, name=SYNC_THREAD, daemon=True
        ).start()

    def _publish(self, file: int, temporary: str, path: Path) -> None:
        """Complete the file, wait until it is on the disk, then give it its name."""
        try:
            if self._is_in_memory:
                with beside_page_cache(temporary, file) as direct:
                    for start, mapping in self._mappings.values():
                        write_all(direct, mapping, start)
            write_all(file, self._header(), self.num_bytes)
            os.fsync(file)
            os.replace(temporary, path)
        except OSError as error:
            warn_not_cached(error)
            with suppress(OSError):
                os.unlink(temporary)
        finally:
            os.close(file)

    def _header(self) -> bytes:
        """The header with the checksums of all tensors, and the footer."""
        mappings = dict(self._mappings.values())  # by offset

        def checked(tensor: _StoredTensor) -> _StoredTensor:
            with memoryview(mappings[tensor.offset]) as content:
                digest = xxhash.xxh3_128_hexdigest(content[: len(tensor.run)])
            return tensor._replace(digest=digest)

        entries = {
            key: entry._replace(tensors={n: checked(one) for n, one in entry.tensors.items()})
            for key, entry in self._entries.items()
        }
        header = json.dumps({"facts": self._facts, "entries": entries}).encode()
        start, size = self.num_bytes, len(header)
        digest = hashlib.sha256(header).digest()
        return header + FOOTER.pack(MAGIC, start, size, start + size + FOOTER.size, digest)

    def _abandon(self, error: OSError) -> None:
        """Keep what is packed in memory, and nothing for the next start."""
        warn_not_cached(error)
        self._is_abandoned = True

    def discard(self) -> None:
        """Remove the file unless it is finished; its pages live as long as its tensors."""
        if self._temporary:
            os.close(self._file)
            with suppress(OSError):
                os.unlink(self._temporary)
            self._file, self._temporary = -1, ""


def resident_tensors(
    entries: Iterable[_EntryHeader], num_bytes: int, available: int
) -> Sequence[_StoredTensor]:
    """The tensors of a file that stay in memory: all if they fit, else those of entries that every
    step reads. Experts then stay on the disk until a step uses them."""
    fits = num_bytes <= available
    return [
        tensor for each in entries if fits or not each.is_sparse for tensor in each.tensors.values()
    ]


def _read_entries(file: int, size: int, facts: object) -> dict[str, _EntryHeader]:
    """The entries of a complete file with these facts; raises `ValueError` or `OSError`."""
    footer = os.pread(file, FOOTER.size, max(0, size - FOOTER.size))
    if len(footer) < FOOTER.size:
        raise ValueError("it is too short")
    magic, start, length, whole, digest = FOOTER.unpack(footer)
    if magic != MAGIC or whole != size:
        raise ValueError("it is incomplete")
    header = os.pread(file, length, start)
    if hashlib.sha256(header).digest() != digest:
        raise ValueError("its header is damaged")
    found = json.loads(header)
    if found["facts"] != facts:
        raise ValueError("it was made from other files, or by another version")
    return {key: _EntryHeader.read(*entry) for key, entry in found["entries"].items()}


def address_of(mapping: mmap.mmap) -> int:
    """The address at which a writable mapping begins."""
    return torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()


def protect(mapping: mmap.mmap) -> None:
    """Make a mapping read-only: a stray write ends the process and does not change the weights."""
    start, size = ctypes.c_void_p(address_of(mapping)), ctypes.c_size_t(len(mapping))
    ctypes.CDLL(None).mprotect(start, size, mmap.PROT_READ)


def warn_not_cached(error: OSError) -> None:
    """Log why no file is written."""
    logger.warning("packed weights are not cached for the next start: %s", error)
