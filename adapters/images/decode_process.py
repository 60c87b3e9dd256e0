"""A process that decodes images in children, which are limited in time and memory and killed.

The process imports the libraries once. For each image it forks a child that decodes and prepares
it, so an image that exceeds its limits ends its own child only. The process has one thread, so
forking is safe. It ends, with its children, when its socket is closed.

A job comes with two files in memory: one has the image, the other one takes the tiles' pixels.

    python -m adapters.images.decode_process FD DIRECTORY SECONDS BYTES
"""

import contextlib
import hashlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import NamedTuple

import msgspec

from adapters.images.decode import bytes_of_base64, decoded
from adapters.images.loading import load_processor, read_settings
from adapters.images.processor import ImageProcessor, Piece
from gateway.ports import UnreadableImage

MESSAGE_BYTES = 1 << 16
NICENESS = 5  # of children: tokens come first
OUT_OF_MEMORY = 3  # exit status


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


class Limits(NamedTuple):
    """What one image may use; the memory is in addition to that of the process."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes and prepares images for one checkpoint."""

    processor: ImageProcessor
    identity: bytes  # of the processor's settings and of the checkpoint

    @classmethod
    def open(cls, directory: Path) -> "Decoder":
        """The decoder of the checkpoint in `directory`. Raises `StartupError`."""
        settings = json.dumps(read_settings(directory), sort_keys=True).encode()
        return cls(load_processor(directory), hashlib.sha256(settings).digest())

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
        with open(target, "wb", closefd=False) as file:
            for piece in pieces:
                if not isinstance(piece, str):
                    file.write(piece.pixels.data)
        return Result(job.number, None, pieces=tuple(_results(pieces, canonical.digest())))


def _results(pieces: Sequence[Piece], image: bytes) -> list[str | TileResult]:
    """The pieces with a digest for each tile: its image, its place and its size decide it."""
    results: list[str | TileResult] = []
    for place, piece in enumerate(pieces):
        if isinstance(piece, str):
            results.append(piece)
            continue
        what = f"{place} {piece.pixels.shape} {piece.grid} {piece.num_tokens}".encode()
        digest = hashlib.sha256(image + what).digest()
        results.append(TileResult(piece.pixels.shape, piece.grid, piece.num_tokens, digest))
    return results


@dataclass(frozen=True, slots=True)
class _Child:
    number: int
    pid: int
    pipe: int  # from which its result is read
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class DecodeProcess:
    """Forks a child for each job on the socket and sends its result."""

    def __init__(self, connection: socket.socket, decoder: Decoder, limits: Limits) -> None:
        self._connection = connection
        self._decoder = decoder
        self._limits = limits
        self._children: dict[int, _Child] = {}  # by pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the socket is closed."""
        try:
            while True:
                for key, _ in self._selector.select(self._seconds_left()):
                    if key.fileobj is not self._connection:
                        self._read(self._children[key.fd])
                    elif not self._receive():
                        return
                for child in [c for c in self._children.values() if c.deadline <= _now()]:
                    os.kill(child.pid, signal.SIGKILL)
                    seconds = f"{self._limits.seconds:g} seconds"
                    self._finish(
                        child, Result(child.number, f"takes longer than {seconds} to read")
                    )
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _receive(self) -> bool:
        """Start the child of a job that has arrived; False at the end."""
        message, files, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 2)
        if not message:
            return False
        self._fork(msgspec.msgpack.decode(message, type=Job), *files)
        return True

    def _fork(self, job: Job, source: int, target: int) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            _run_child(self._decoder, job, (source, target, write_end), self._limits)
        for file in (source, target, write_end):
            os.close(file)
        self._children[read_end] = _Child(job.number, pid, read_end, _now() + self._limits.seconds)
        self._selector.register(read_end, selectors.EVENT_READ)

    def _read(self, child: _Child) -> None:
        """Read more of the child's result; at its end the child has ended."""
        if piece := os.read(child.pipe, MESSAGE_BYTES):
            child.received.extend(piece)
        else:
            self._finish(child, None)

    def _finish(self, child: _Child, result: Result | None) -> None:
        _, status = os.waitpid(child.pid, 0)
        del self._children[child.pipe]
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        message = bytes(child.received)
        if result is not None or status:
            result = result or _failure(child.number, status)
            message = msgspec.msgpack.encode(result)
        self._connection.sendall(message)

    def _seconds_left(self) -> float | None:
        """Until the next deadline; None if no child runs."""
        deadlines = [child.deadline for child in self._children.values()]
        return max(0.0, min(deadlines) - _now()) if deadlines else None


def _failure(number: int, status: int) -> Result:
    """The result of a child that ended without one."""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return Result(number, None, is_lost=True)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == OUT_OF_MEMORY:
        return Result(number, "needs too much memory to read")
    return Result(number, "cannot be decoded")


def _run_child(decoder: Decoder, job: Job, files: tuple[int, int, int], limits: Limits) -> None:
    """Write the result and exit; a child that exceeds its limits exits without one."""
    source, target, pipe = files
    status = 1
    with contextlib.suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # native code prints aborts
        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(limits.seconds) + 1,) * 2)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + limits.num_bytes,) * 2)
        try:
            result = msgspec.msgpack.encode(decoder.run(job, source, target))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        with open(pipe, "wb") as file:
            file.write(result)
        status = 0
    os._exit(status)


def _address_space() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _now() -> float:
    return time.monotonic()


def main() -> None:
    """The entry point; see the module's docstring."""
    descriptor, directory, seconds, num_bytes = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    decoder = Decoder.open(Path(directory))
    DecodeProcess(connection, decoder, Limits(float(seconds), int(num_bytes))).run()


if __name__ == "__main__":
    main()
