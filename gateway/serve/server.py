"""The server's lifecycle: listen, run the engines, and drain on a signal.

SIGTERM drains: new requests get a 503, running ones may finish within `drain_seconds`. SIGINT, or
a second signal of either kind, ends the running requests at once, each with an error. The listening
socket closes after that, so that clients get a 503 meanwhile and not a refused connection. One
more SIGINT ends the process immediately.

If the engine fails because its workers cannot be restarted, `/health` and all requests get a 503
for `FAILED_SECONDS`, and then the server ends with an error.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import uvicorn

from engine.errors import StartupError, Unavailable
from engine.transport.process_memory import drop_library_pages, trim_heap
from gateway.access.intake import Intake
from gateway.serve.acceptor import Acceptor, defer_silent
from gateway.serve.connection import ConnectionBounds
from gateway.serve.places import Places
from gateway.serve.websocket import UpgradableConnection

if TYPE_CHECKING:
    import ssl
    from types import TracebackType

    from starlette.types import ASGIApp

    from gateway.batch.runner import BatchRunner
    from gateway.generation.restored_streams import Later
    from gateway.groups.groups import Groups
    from gateway.observe.backpressure import LoopWatch
    from gateway.observe.request_log import RequestLog
    from gateway.store.held_streams import HeldStreams

T = TypeVar("T")
logger = logging.getLogger(__name__)

BACKLOG = 2048
CONNECTIONS_SHARE = 0.1  # of the loop's time, for setting connections up beside generation
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGE_BLOCK_BYTES = 1 << 20  # a larger block is a mapping of its own, which free() removes
FREE_BYTES = 4 << 20  # at the end of a heap; more are returned
INTERRUPTED = 130
KEEP_ALIVE_SECONDS = 75
RESERVED_FILES = 128  # reserved for weights, pipes to workers, the store
FLUSH_SECONDS = 5  # for the last bytes, after the last request has ended
DATE_SECONDS = 1.0  # for which the date header is not renewed
FAILED_SECONDS = 5.0  # in which `/health` reports that the engine has failed


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; raises `StartupError`. Port 0: any free one."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


class Signals:
    """SIGTERM and SIGINT as events, SIGHUP as a callback, inside its `with` block.

    `stop` is set by the first signal, `abort` by SIGINT or a second signal.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.abort = asyncio.Event()
        self.is_interrupt = False
        self._numbers = [signal.SIGTERM, signal.SIGINT]

    def on_hangup(self, reload: Callable[[], None]) -> None:
        """Call `reload` on SIGHUP. Without it SIGHUP ends the process."""
        self._numbers.append(signal.SIGHUP)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._take, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        if number is signal.SIGINT and self.abort.is_set():
            logger.warning("second SIGINT: the process ends without waiting")
            os._exit(INTERRUPTED)  # the workers end when their pipes close
        if number is signal.SIGINT or self.stop.is_set():
            self.abort.set()
        if not self.stop.is_set():
            self.is_interrupt = number is signal.SIGINT
        self.stop.set()


async def unless_stopped(work: asyncio.Task[T], signals: Signals) -> T | None:
    """The result of `work`; None if a signal arrived first, which cancels `work`."""
    stopping = asyncio.create_task(signals.stop.wait())
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return None
    finally:
        for task in (work, stopping):
            task.cancel()
        await asyncio.wait((work, stopping))


async def _nothing() -> None:
    """There is no stream to restore."""


async def _restore_nothing() -> "Later":
    """What is restored of a server without streams: nothing."""
    return _nothing


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, and without a look at `should_exit` ten times per
    second; `listens` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()
        self._exits = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    async def main_loop(self) -> None:
        """Renew the date header until `exit` is called."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exits.wait(), DATE_SECONDS)

    def exit(self) -> None:
        """End `serve` once the open responses are complete."""
        self.should_exit = True
        self._exits.set()


@dataclass(frozen=True, slots=True)
class Server:
    """An app and its models, with the batch runner and the probe of the event loop's lag."""

    app: "ASGIApp"
    groups: "Groups"
    watch: "LoopWatch"
    runner: "BatchRunner"
    drain_seconds: float
    request_log: "RequestLog"
    held: "HeldStreams"
    bounds: ConnectionBounds = field(default_factory=ConnectionBounds)
    # Awaited before requests are accepted; its result is awaited beside them.
    restore: "Callable[[], Awaitable[Later]]" = _restore_nothing
    tls: "ssl.SSLContext | None" = None

    async def serve(
        self, listener: socket.socket, signals: Signals, on_ready: Callable[[], None]
    ) -> None:
        """Serve on the bound socket until a signal, then drain. Closes the socket.

        Raises `Unavailable` if the engine has failed.
        """
        server = _Uvicorn(_config(self))
        listener.listen(BACKLOG)
        defer_silent(listener)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.groups.run())
            watching = group.create_task(self.watch.run())
            batching = group.create_task(self.runner.run())
            serving = group.create_task(server.serve([]))
            await server.listens.wait()
            restoring = group.create_task((await self.restore())())
            accepting = group.create_task(self._accept(server, listener))
            tune_collector()
            return_large_blocks()
            drop_library_pages()
            on_ready()
            await self._until_stopped(signals)
            restoring.cancel()
            batching.cancel()  # unfinished lines run after the next start
            await asyncio.wait((batching, restoring))
            await self._drain(signals)
            await self.held.close()
            accepting.cancel()
            server.exit()
            await serving
            running.cancel()
            watching.cancel()
        if self.groups.failure is not None:
            raise Unavailable(self.groups.failure)

    async def _until_stopped(self, signals: Signals) -> None:
        """Wait for a signal, or until the engine has failed and `/health` has reported it."""
        failing = asyncio.create_task(self.groups.failed.wait())
        await unless_stopped(failing, signals)
        if self.groups.failed.is_set() and not signals.stop.is_set():
            logger.error("%s The server ends in %g s.", self.groups.failure, FAILED_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(signals.stop.wait(), FAILED_SECONDS)

    async def _accept(self, server: _Uvicorn, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        make = partial(
            UpgradableConnection,
            config=server.config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
            bounds=self.bounds,
            log=self.request_log,
        )
        places = Places(self.bounds.max_connections, self.bounds.max_per_network)
        intake = Intake(
            self.request_log.clock,
            time.thread_time,
            lambda: self.groups.is_generating,
            lambda: self.watch.is_busy,
            share=CONNECTIONS_SHARE,
            busy_share=CONNECTIONS_SHARE,
        )
        await Acceptor(lambda place: make(place=place), places, intake, self.tls).run(listener)

    async def _drain(self, signals: Signals) -> None:
        if not signals.abort.is_set():
            logger.info("draining: running requests may finish within %g s", self.drain_seconds)
        draining = asyncio.create_task(self.groups.drain(self.drain_seconds))
        aborting = asyncio.create_task(signals.abort.wait())
        await asyncio.wait((draining, aborting), return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, aborting):
            task.cancel()
        await asyncio.wait((draining, aborting))
        await self.groups.drain(0)


def tune_collector() -> None:
    """Exclude from garbage collection what lives as long as the process.

    Requests are freed by reference counting. Full collections over all modules, several times a
    second, took 8 % of the loop's time. A full collection now scans live requests only, and runs
    after ten million container objects that were allocated and not freed. What a start leaves is
    frozen too: collecting it would delay the first request.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


def return_large_blocks() -> None:
    """Return the memory of large objects to the system when they are freed (glibc only).

    By default glibc keeps up to 64 MiB for each of its heaps once blocks of up to 32 MiB have been
    freed: token ids of long texts, and bodies. What the start has freed is returned now, 10 MiB
    after a large tokenizer was loaded.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, FREE_BYTES)
    trim_heap()


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard limit. Returns the connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(
            ValueError, OSError
        ):  # macOS reports a higher limit than it allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    most = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(1, most - RESERVED_FILES)


def _config(server: Server) -> uvicorn.Config:
    return uvicorn.Config(
        server.app,
        http=UpgradableConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.ERROR,  # the request log has a line for each invalid request
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
