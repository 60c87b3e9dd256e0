"""Matrices rounded to 8 bits as they are taken, and kept in a file for the next start.

The file is safetensors: for each part of a matrix that a worker takes its integers and their
scales, and in the metadata what they were made from. One file belongs to one checkpoint and one
worker's share of it; another start writes a new one beside it and puts it in its place when it is
whole, so that any number of workers may do so at once. What is broken or made from something else
is rounded again, and where nothing can be kept, rounding goes on without; a line says so.
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

from engine.worker.ports import WeightSource
from engine.worker.weights.int8_weight import Int8Weight, Weight, quantize
from engine.worker.weights.mappings import drop_pages

logger = logging.getLogger(__name__)

VERSION = 1  # of what a file holds; another rounding is another version
SCALES = "_scales"
FOLDER = "weights"
HEADER_BYTES = 1024  # room for each tensor's entries; three parts of a name take 900
_TYPES = {torch.int8: "I8", torch.float32: "F32"}
_NAME_DIGITS = 24


def facts_about(files: Sequence[Path]) -> str:
    """What the rounded weights of these files are made from, without reading them."""
    stats = [(path, path.stat()) for path in files]
    seen = [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return json.dumps({"version": VERSION, "files": seen})


def file_for(files: Sequence[Path], share: Sequence[int], directory: str) -> Path | None:
    """Where a worker's share, told by any numbers, is kept; None without files or directory."""
    if not files or not directory:
        return None
    place = json.dumps([str(files[0].resolve()), *share])
    digest = hashlib.sha256(place.encode()).hexdigest()
    return Path(directory) / FOLDER / f"{digest[:_NAME_DIGITS]}.safetensors"


@contextmanager
def quantizing(
    weights: WeightSource, num_tensors: int, kept: Path | None, facts: str
) -> Iterator[WeightSource]:
    """The same weights with every matrix rounded, from the file `kept` if it has them.

    `num_tensors` is how many there are at most to be kept.
    """
    if kept is None:
        yield QuantizingWeights(weights, None, None)
        return
    found = _Found.open(kept, facts)
    new = None if found is not None else _New.open(kept, facts, num_tensors)
    source = QuantizingWeights(weights, found, new)
    try:
        yield source
        source.finish()
    finally:
        source.close()


class QuantizingWeights:
    """A `WeightSource`: another one's, but for its matrices."""

    def __init__(self, weights: WeightSource, found: "_Found | None", new: "_New | None") -> None:
        self._weights = weights
        self._found = found
        self._new = new

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """See `WeightSource`."""
        return self._weights.take(name, *shape, rows=rows, columns=columns)

    def take_matrix(
        self,
        name: str,
        outputs: int,
        inputs: int,
        *,
        rows: range | None = None,
        columns: range | None = None,
        is_transposed: bool = False,
    ) -> Weight:
        """See `WeightSource`."""
        key = f"{name}{_ends(rows, outputs)}{_ends(columns, inputs)}"
        if self._found is not None:
            shape = tuple(
                size if run is None else len(run)
                for run, size in ((rows, outputs), (columns, inputs))
            )
            recalled = self._found.read(key, shape)
            if recalled is not None:
                self._weights.skip(name)
                return recalled
        weight = quantize(
            self._weights.take_matrix(
                name, outputs, inputs, rows=rows, columns=columns, is_transposed=is_transposed
            )
        )
        if self._new is not None and not self._new.add(key, weight):
            self._new = None
        return weight

    def skip(self, name: str) -> None:
        """See `WeightSource`."""
        self._weights.skip(name)

    def finish(self) -> None:
        """Put the new file in its place."""
        if self._new is not None:
            self._new.finish()

    def close(self) -> None:
        """Leave nothing half done behind."""
        if self._new is not None:
            self._new.close()
        if self._found is not None:
            self._found.drop_pages()


def _ends(run: range | None, size: int) -> str:
    return f"[0:{size}]" if run is None else f"[{run.start}:{run.stop}]"


class _Found:
    """A file from an earlier start."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self._names = set(file.keys())

    @classmethod
    def open(cls, path: Path, facts: str) -> "_Found | None":
        """None if there is none, or, with a line that says so, none of use."""
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            if (file.metadata() or {}).get("facts") != facts:
                raise ValueError("they are of other files, or of another version")
            return cls(path, file)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            logger.warning("weights are rounded again, not read from %s: %s", path, error)
            return None

    def read(self, key: str, shape: tuple[int, ...]) -> Int8Weight | None:
        """A matrix that is there in this shape."""
        if not {key, key + SCALES} <= self._names:
            return None
        found = Int8Weight(self._file.get_tensor(key), self._file.get_tensor(key + SCALES))
        kinds = (found.values.dtype, found.scales.dtype)
        is_right = tuple(found.shape) == shape and tuple(found.scales.shape) == shape[:1]
        return found if is_right and kinds == tuple(_TYPES) else None

    def drop_pages(self) -> None:
        drop_pages([self._path])


class _New:
    """A file that grows by one matrix at a time, under another name until it is whole."""

    def __init__(self, path: Path, temporary: str, file: BinaryIO, facts: str, room: int) -> None:
        self._path = path
        self._temporary: str | None = temporary
        self._file = file
        self._header: dict[str, object] = {"__metadata__": {"facts": facts}}
        self._room = room
        self._num_bytes = 0
        file.seek(8 + room)

    @classmethod
    def open(cls, path: Path, facts: str, num_tensors: int) -> "_New | None":
        """None, with a line that says so, where no file can be made."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".new")
            room = HEADER_BYTES * (num_tensors + 1) + 8 * len(facts)
            return cls(path, temporary, os.fdopen(handle, "wb"), facts, room // 8 * 8)
        except OSError as error:
            logger.warning("rounded weights are not kept for the next start: %s", error)
            return None

    def add(self, key: str, weight: Int8Weight) -> bool:
        """Whether it was written; if not, the file is given up, with a line that says so."""
        try:
            self._write(key, weight.values)
            self._write(key + SCALES, weight.scales)
        except OSError as error:
            self._give_up(error)
            return False
        return True

    def finish(self) -> None:
        """Write what the file holds in front of it, and give it its name."""
        header = json.dumps(self._header).encode()
        try:
            if len(header) > self._room:
                raise OSError("the names of its tensors are too long")
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
            self._file.close()
            assert self._temporary is not None, "a file that was given up is not finished"
            os.replace(self._temporary, self._path)
            self._temporary = None
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Remove it, unless it is finished."""
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

    def _give_up(self, error: OSError) -> None:
        logger.warning("rounded weights are not kept for the next start: %s", error)
        self.close()
