"""Weights converted to a quantized format as they are loaded, and cached on disk.

A cache file is safetensors: for each slice of a matrix that a worker loads, its quantized values
and scales; its metadata says from which files they were made. One file belongs to one checkpoint,
one worker's share of it and one format. A start that finds no usable file writes a new one under
a temporary name and renames it when complete, so any number of workers may do so at once. A file
that is broken or made from something else is replaced, and where nothing can be written, the
worker quantizes at every start; both log one line.
"""

# mypy: disable-error-code="no-untyped-call"
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.worker.ports import LinearFormat, TensorSlice, Weight, WeightSource
from engine.worker.weights.mappings import drop_pages

logger = logging.getLogger(__name__)

VERSION = 1  # of what a file holds; another way to quantize is another version
FOLDER = "weights"
HEADER_BYTES = 1024  # reserved for each tensor's entries; three slices of one tensor take 900
_TYPES = {torch.int8: "I8", torch.uint8: "U8", torch.float16: "F16", torch.float32: "F32"}
_NAME_DIGITS = 24


def source_facts(files: Sequence[Path]) -> str:
    """What identifies the files that weights are quantized from, without reading them."""
    stats = [(path, path.stat()) for path in files]
    seen = [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return json.dumps({"version": VERSION, "files": seen})


def cache_file(
    files: Sequence[Path], share: Sequence[int], format_name: str, directory: str
) -> Path | None:
    """Where one worker's share is cached; `share` is any numbers that identify it.

    None if there are no files or no cache directory.
    """
    if not files or not directory:
        return None
    identity = json.dumps([str(files[0].resolve()), *share])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return Path(directory) / FOLDER / f"{digest[:_NAME_DIGITS]}.{format_name}.safetensors"


@contextmanager
def converted(
    weights: WeightSource, to: LinearFormat, num_tensors: int, path: Path | None, facts: str
) -> Iterator[WeightSource]:
    """The same weights with every matrix converted, from the cache file `path` where it has them.

    `num_tensors` is an upper bound of how many will be cached; `path` None caches nothing.
    """
    if path is None or not to.is_cached:
        yield ConvertedWeights(weights, to, None, None)
        return
    cached = _CacheReader.open(path, facts)
    new = None if cached is not None else _CacheWriter.open(path, facts, num_tensors)
    source = ConvertedWeights(weights, to, cached, new)
    try:
        yield source
        source.finish()
    finally:
        source.close()


class ConvertedWeights:
    """A `WeightSource` that converts the linear weights of another one."""

    def __init__(
        self,
        weights: WeightSource,
        to: LinearFormat,
        cached: "_CacheReader | None",
        new: "_CacheWriter | None",
    ) -> None:
        self._weights = weights
        self._format = to
        self._cached = cached
        self._new = new

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def tensor(self, part: TensorSlice) -> Tensor:
        return self._weights.tensor(part)

    def weight(self, part: TensorSlice) -> Weight:
        key = part.name + "".join(f"[{run.start}:{run.stop}]" for run in part.ranges)
        if self._cached is not None:
            rows, columns = part.sizes
            found = self._format.load(self._cached.read(key), (rows, columns))
            if found is not None:
                self._weights.skip(part.name)
                return found
        weight = self._format.convert(self._weights.weight(part))
        if self._new is not None and not self._new.add(key, weight):
            self._new = None
        return weight

    def skip(self, name: str) -> None:
        self._weights.skip(name)

    def finish(self) -> None:
        """Complete the new cache file."""
        if self._new is not None:
            self._new.finish()

    def close(self) -> None:
        """Remove an incomplete cache file, and release the pages of one that was read."""
        if self._new is not None:
            self._new.close()
        if self._cached is not None:
            self._cached.drop_pages()


class _CacheReader:
    """A cache file from an earlier start."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self._names: dict[str, list[str]] = {}  # by key
        for name in file.keys():  # noqa: SIM118 (safetensors' file is no mapping)
            self._names.setdefault(name[: name.rfind("]") + 1], []).append(name)

    @classmethod
    def open(cls, path: Path, facts: str) -> "_CacheReader | None":
        """None if there is no file, or, with a line in the log, no usable one."""
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            if (file.metadata() or {}).get("facts") != facts:
                raise ValueError("it was made from other files, or by another version")
            return cls(path, file)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            logger.warning(
                "the cache of quantized weights %s cannot be used, so they are quantized again: %s",
                path,
                error,
            )
            return None

    def read(self, key: str) -> dict[str, Tensor]:
        """The tensors cached under this key, by their suffixes; empty if there are none."""
        return {
            name.removeprefix(key): self._file.get_tensor(name) for name in self._names.get(key, ())
        }

    def drop_pages(self) -> None:
        drop_pages([self._path])


class _CacheWriter:
    """A cache file that grows by one matrix at a time, under a temporary name until complete."""

    def __init__(
        self, path: Path, temporary: str, file: BinaryIO, facts: str, header_bytes: int
    ) -> None:
        self._path = path
        self._temporary: str | None = temporary
        self._file = file
        self._header: dict[str, object] = {"__metadata__": {"facts": facts}}
        self._header_bytes = header_bytes
        self._num_bytes = 0
        file.seek(8 + header_bytes)

    @classmethod
    def open(cls, path: Path, facts: str, num_tensors: int) -> "_CacheWriter | None":
        """None, with a line in the log, where no file can be created."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".new")
            header_bytes = HEADER_BYTES * (num_tensors + 1) + 8 * len(facts)
            file = os.fdopen(handle, "wb")
            return cls(path, temporary, file, facts, header_bytes // 8 * 8)
        except OSError as error:
            _warn_not_cached(error)
            return None

    def add(self, key: str, weight: Weight) -> bool:
        """Whether the weight was written; if not, the file is removed and a line is logged."""
        tensors = {"": weight} if isinstance(weight, Tensor) else weight.tensors
        try:
            for suffix, tensor in tensors.items():
                self._write(key + suffix, tensor)
        except OSError as error:
            self._abandon(error)
            return False
        return True

    def finish(self) -> None:
        """Write the header and rename the file to its final name."""
        header = json.dumps(self._header).encode()
        try:
            if len(header) > self._header_bytes:
                raise OSError("the names of its tensors are too long")
            self._file.seek(0)
            size = self._header_bytes
            self._file.write(size.to_bytes(8, "little") + header.ljust(size))
            self._file.close()
            assert self._temporary is not None, "an abandoned file is not finished"
            os.replace(self._temporary, self._path)
            self._temporary = None
        except OSError as error:
            self._abandon(error)

    def close(self) -> None:
        """Remove the file unless it is finished."""
        with suppress(OSError):
            self._file.close()
        if self._temporary is not None:
            with suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None

    def _write(self, name: str, tensor: Tensor) -> None:
        start = self._num_bytes
        self._num_bytes += self._file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        self._header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, self._num_bytes],
        }

    def _abandon(self, error: OSError) -> None:
        _warn_not_cached(error)
        self.close()


def _warn_not_cached(error: OSError) -> None:
    logger.warning("quantized weights are not cached for the next start: %s", error)
