"""The server's side of `adapters.grammar.compile_process`: checks grammars in another process."""

import asyncio
import contextlib
import itertools
import logging
import socket
from pathlib import Path
from subprocess import Popen

import msgspec

from adapters.grammar.compile_process import CompileRequest, Verdict, encode
from adapters.isolation import process as isolation
from adapters.isolation.children import RECEIVE_BYTES
from engine.errors import Unavailable
from engine.step import Grammar
from engine.transport.wire import FrameReader

logger = logging.getLogger(__name__)

SECONDS = 5.0
NUM_BYTES = 256 << 20
ANSWER_SECONDS = 10.0  # for a verdict to arrive, beyond twice what a compilation may take
LOST = "The process that compiles grammars was lost; try again."


class IsolatedCompiler:
    """A `GrammarChecker` for the model in `directory`.

    `loader` names the function that loads its `TokenTable`, as "module:function". One grammar may
    take `seconds`, and `num_bytes` of memory. The process is started by the first check, and by the
    next one after it was lost. `close` ends it.
    """

    def __init__(
        self,
        loader: str,
        directory: Path,
        seconds: float = SECONDS,
        num_bytes: int = NUM_BYTES,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._verdict_seconds = 2 * seconds + answer_seconds
        self._arguments = [loader, str(directory), str(seconds), str(num_bytes)]
        self._process: Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._pending: dict[int, asyncio.Future[Verdict]] = {}
        self._numbers = itertools.count()
        self._sending = asyncio.Lock()  # frames are sent whole

    def _start(self) -> socket.socket:
        """Start the process; it reads requests once it has opened the vocabulary."""
        self._process, ours = isolation.start(
            "adapters.grammar.compile_process",
            self._arguments,
            socket.SOCK_STREAM,
            {"TOKENIZERS_PARALLELISM": "false"},
        )
        self._connection = ours
        self._reading = asyncio.get_running_loop().create_task(self._read(ours), name="verdicts")
        return ours

    async def check(self, grammar: Grammar, seconds: float | None = None) -> str | None:
        """Why the grammar cannot be used, or None. Raises `Unavailable` if the process is lost, and
        `TimeoutError` if a try of so many `seconds` is too short."""
        verdict = await self._verdict(grammar, seconds)
        if verdict.is_late and seconds is not None:
            raise TimeoutError
        return verdict.error

    async def _verdict(self, grammar: Grammar, seconds: float | None) -> Verdict:
        connection = self._connection or self._start()
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        verdict: asyncio.Future[Verdict] = loop.create_future()
        self._pending[number] = verdict
        try:
            async with asyncio.timeout(self._verdict_seconds):
                async with self._sending:
                    request = CompileRequest(number, grammar, seconds)
                    await loop.sock_sendall(connection, encode(request))
                return await verdict
        except TimeoutError as error:
            if self._connection is connection and self._process is not None:
                logger.error("the process that compiles grammars does not answer: it is replaced")
                self._process.kill()
                if self._reading is not None:  # it sees the end of the process
                    await asyncio.wait((self._reading,), timeout=2 * isolation.EXIT_SECONDS)
            raise Unavailable(LOST) from error
        except OSError as error:
            raise Unavailable(LOST) from error
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        """End the process and its children. Idempotent."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait((reading,))
        await self._end()

    async def _read(self, connection: socket.socket) -> None:
        frames = FrameReader()
        with contextlib.suppress(OSError):
            while piece := await asyncio.get_running_loop().sock_recv(connection, RECEIVE_BYTES):
                for payload in frames.feed(piece):
                    verdict = msgspec.msgpack.decode(payload, type=Verdict)
                    pending = self._pending.get(verdict.number)
                    if pending is not None and not pending.done():
                        pending.set_result(verdict)
        logger.error("the process that compiles grammars was lost")
        await self._end()

    async def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for verdict in self._pending.values():
            if not verdict.done():
                verdict.set_exception(Unavailable(LOST))
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(isolation.reap, process)
