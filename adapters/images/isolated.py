"""The server's side of `adapters.images.decode_process`: images are decoded in another process."""

import asyncio
import contextlib
import itertools
import logging
import math
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import msgspec
import numpy as np

from adapters.images.decode_process import IDLE_SECONDS, Job, Result, TileResult
from adapters.images.loading import load_processor
from adapters.isolation import process as isolation
from adapters.isolation.children import RECEIVE_BYTES
from engine.errors import Unavailable
from engine.media import Pixels
from gateway.ports import EncodedImage, ImageTile, PreparedImage, UnreadableImage

logger = logging.getLogger(__name__)

SECONDS = 10.0
NUM_BYTES = 1 << 30
ANSWER_SECONDS = 20.0  # for a result to arrive, beyond what decoding may take
ATTEMPTS = 2  # at an image whose process was lost
LOST = "The process that decodes images was lost; please try again."
# A text becomes bytes in pieces of this size, since this holds the interpreter
COPIED_BYTES = 1 << 20


class _Lost(Exception):
    """The process ended without the result."""


class IsolatedDecoder:
    """An `ImageDecoder` for the checkpoint in `directory`, or the file of its image encoder.

    One image may take `seconds`, and `num_bytes` of memory. The process is started by the first
    image, and by the next one after it was lost. `close` ends it. Raises `StartupError`.
    """

    def __init__(
        self,
        directory: Path,
        seconds: float = SECONDS,
        num_bytes: int = NUM_BYTES,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        processor = load_processor(directory)
        self.placeholder = processor.placeholder
        self.soft_token = processor.soft_token
        self.reserved = processor.reserved
        self._values = processor.values
        self._result_seconds = IDLE_SECONDS + seconds + answer_seconds
        self._arguments = [str(directory), str(seconds), str(num_bytes)]
        self._process: Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._pending: dict[int, asyncio.Future[Result]] = {}
        self._numbers = itertools.count()
        self._ending: list[asyncio.Future[None]] = []

    async def prepare(self, image: EncodedImage, max_tokens: int) -> PreparedImage:
        """The image as the encoder reads it; see `ImageDecoder`."""
        with _memory("image") as source:
            await asyncio.to_thread(_write, source, image)
            for _ in range(ATTEMPTS):
                with contextlib.suppress(_Lost), _memory("pixels") as target:
                    result = await self._result(image.is_base64, max_tokens, (source, target))
                    return self._prepared(result, target)
        raise Unavailable(LOST)

    async def _result(self, is_base64: bool, max_tokens: int, files: tuple[int, int]) -> Result:
        """The result of the process. Raises `UnreadableImage`, and `_Lost` if it has none."""
        connection = self._connection or self._start()
        number = next(self._numbers)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            job = msgspec.msgpack.encode(Job(number, is_base64, max_tokens))
            socket.send_fds(connection, [job], files)
            async with asyncio.timeout(self._result_seconds):
                result = await future
        except TimeoutError:
            logger.error("the process that decodes images does not answer: it is replaced")
            if self._connection is connection:
                self._end()
            raise _Lost from None
        except OSError:
            raise _Lost from None
        finally:
            self._pending.pop(number, None)
        if result.is_lost:
            raise _Lost
        if result.error is not None:
            raise UnreadableImage(result.error)
        return result

    def _prepared(self, result: Result, file: int) -> PreparedImage:
        """The pieces; the pixels stay in the memory of the file."""
        shapes = [piece.shape for piece in result.pieces if isinstance(piece, TileResult)]
        levels = np.frombuffer(mmap.mmap(file, sum(map(math.prod, shapes))), np.uint8)
        pieces: list[str | ImageTile] = []
        start = 0
        for piece in result.pieces:
            if isinstance(piece, str):
                pieces.append(piece)
                continue
            end = start + math.prod(piece.shape)
            pixels = Pixels(levels[start:end].reshape(piece.shape), self._values)
            pieces.append(ImageTile(piece.num_tokens, piece.digest, pixels, piece.grid))
            start = end
        return PreparedImage(tuple(pieces))

    def _start(self) -> socket.socket:
        """Start the process; it reads jobs once it has imported its libraries."""
        self._process, ours = isolation.start(
            "adapters.images.decode_process",
            self._arguments,
            socket.SOCK_SEQPACKET,
            {"OPENBLAS_NUM_THREADS": "1"},
        )
        self._connection = ours
        asyncio.get_running_loop().add_reader(ours, self._receive, ours)
        return ours

    def _receive(self, connection: socket.socket) -> None:
        """A result has arrived, or the process has ended."""
        message = b""
        with contextlib.suppress(OSError):
            message = connection.recv(RECEIVE_BYTES)
        if message:
            result = msgspec.msgpack.decode(message, type=Result)
            if (future := self._pending.get(result.number)) and not future.done():
                future.set_result(result)
            return
        logger.error("the process that decodes images was lost")
        self._end()

    def _end(self) -> None:
        """End the process; those who wait for its results raise `_Lost`."""
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        if connection is None or process is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection)
        connection.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(_Lost())
        self._ending.append(loop.run_in_executor(None, isolation.reap, process))

    async def close(self) -> None:
        """End the process and its children. Idempotent."""
        self._end()
        await asyncio.gather(*self._ending)
        self._ending.clear()


@contextlib.contextmanager
def _memory(name: str) -> Iterator[int]:
    """A file in memory, which is freed when no process has it open or mapped."""
    file = os.memfd_create(name)
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, image: EncodedImage) -> None:
    """Write the image's bytes, or its base64 text, to the file."""
    for piece in _pieces(image.data):
        view = memoryview(piece)
        while view:
            view = view[os.write(file, view) :]


def _pieces(data: bytes | str) -> Iterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    for start in range(0, len(data), COPIED_BYTES):
        yield data[start : start + COPIED_BYTES].encode("ascii", errors="replace")
