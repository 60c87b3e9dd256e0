"""A process that decodes images in children, which are limited in time and memory and killed.

The process imports the libraries once. For each image it forks a child that decodes and prepares
it (`adapters.isolation.children`).

A job comes with two files in memory: one has the image, the other one takes the tiles' pixels.

    python -m adapters.images.decode_process FD DIRECTORY SECONDS BYTES
"""

import hashlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from adapters.images.decode import bytes_of_base64, decoded
from adapters.images.loading import load_processor, read_settings
from adapters.images.processor import ImageProcessor, Piece
from adapters.isolation.children import RECEIVE_BYTES, Children, Limits, Outcome, connect
from gateway.ports import UnreadableImage

# Beside a worker's threads a child makes iterations twice as long, whatever its niceness: each
# thread waits for the others. Where no core is ever idle, an image takes so much longer.
IDLE_SECONDS = 3.0


class Job(NamedTuple):
    """An image to decode; `number` identifies it in the result."""

    number: int
    is_base64: bool
    max_tokens: int


class TileResult(msgspec.Struct, frozen=True, array_like=True):
    """A tile whose pixels are in the job's second file, behind those of the tiles before it."""

    shape: tuple[int, ...]
    grid: tuple[int, int, int]
    num_tokens: int
    digest: bytes


class Result(NamedTuple):
    """`error` says why an image cannot be read. `is_lost`: its child was killed from outside."""

    number: int
    error: str | None
    is_lost: bool = False
    pieces: tuple[str | TileResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes and prepares images for one checkpoint."""

    processor: ImageProcessor
    identity: bytes  # identifies the processor's settings and the checkpoint

    @classmethod
    def open(cls, directory: Path) -> "Decoder":
        """The decoder of the checkpoint in `directory`. Raises `StartupError`."""
        settings = json.dumps(read_settings(directory), sort_keys=True).encode()
        return cls(load_processor(directory), hashlib.sha256(settings).digest())

    def output(self, job: Job, source: int, target: int) -> bytes:
        """What a child returns: the result of `run`."""
        return msgspec.msgpack.encode(self.run(job, source, target))

    def run(self, job: Job, source: int, target: int) -> Result:
        """Decode the image in the file `source` and write its pixels to the file `target`."""
        data = os.pread(source, os.fstat(source).st_size, 0)
        try:
            image = decoded(bytes_of_base64(data) if job.is_base64 else data)
            pieces = self.processor.process(image, job.max_tokens)
        except UnreadableImage as error:
            return Result(job.number, str(error))
        canonical = hashlib.sha256(self.identity + b"%d %d " % image.size)
        canonical.update(image.tobytes())
        os.lseek(target, 0, os.SEEK_SET)  # a child that was killed may have written
        with open(target, "wb", closefd=False) as file:
            for piece in pieces:
                if not isinstance(piece, str):
                    file.write(np.ascontiguousarray(piece.levels).data)
        return Result(job.number, None, pieces=tuple(_results(pieces, canonical.digest())))


def _results(pieces: Sequence[Piece], image: bytes) -> list[str | TileResult]:
    """The pieces with a digest for each tile: its image, its place and its size decide it."""
    results: list[str | TileResult] = []
    for place, piece in enumerate(pieces):
        if isinstance(piece, str):
            results.append(piece)
            continue
        what = f"{place} {piece.levels.shape} {piece.grid} {piece.num_tokens}".encode()
        digest = hashlib.sha256(image + what).digest()
        results.append(TileResult(piece.levels.shape, piece.grid, piece.num_tokens, digest))
    return results


class DecodeProcess:
    """Forks a child for each job on the socket and sends its result."""

    def __init__(self, connection: socket.socket, decoder: Decoder, limits: Limits) -> None:
        self._connection = connection
        self._decoder = decoder
        self._children = Children(limits)

    def run(self) -> None:
        """Serve until the socket is closed."""
        self._children.serve(self._connection, self._receive, self._answer)

    def _receive(self) -> bool:
        """Start the child of a job that has arrived; False at the end."""
        message, files, _, _ = socket.recv_fds(self._connection, RECEIVE_BYTES, 2)
        if not message:
            return False
        job = msgspec.msgpack.decode(message, type=Job)
        self._children.fork(job.number, partial(self._decoder.output, job, *files), files=files)
        return True

    def _answer(self, outcome: Outcome) -> None:
        message = outcome.output
        if outcome.is_late or outcome.status:
            message = msgspec.msgpack.encode(_failure(outcome, self._children.limits.seconds))
        self._connection.sendall(message)


def _failure(outcome: Outcome, seconds: float) -> Result:
    """The result of a child that ended without one."""
    if outcome.is_late:
        return Result(outcome.number, f"takes longer than {seconds:g} seconds to read")
    if outcome.is_killed:
        return Result(outcome.number, None, is_lost=True)
    if outcome.is_out_of_memory:
        return Result(outcome.number, "needs too much memory to read")
    return Result(outcome.number, "cannot be decoded")


def main() -> None:
    """The entry point; see the module's docstring."""
    descriptor, directory, seconds, num_bytes = sys.argv[1:]
    connection = connect(descriptor)
    decoder = Decoder.open(Path(directory))
    limits = Limits(float(seconds), int(num_bytes), IDLE_SECONDS)
    DecodeProcess(connection, decoder, limits).run()


if __name__ == "__main__":
    main()
