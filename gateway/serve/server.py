"""The server's lifecycle: listen, run the engines, and drain on a signal.

SIGTERM drains: new requests get a 503, running ones may finish within `drain_seconds`, and
responses say `connection: close`, so that retries reach another server. SIGINT, or a second signal
of either kind, ends the running requests at once, each with an error. The listening socket closes
after that, so that clients get a 503 meanwhile and not a refused connection. One more SIGINT ends
the process immediately.

If the engine fails because its workers cannot be restarted, `/health` and all requests get a 503
for `FAILED_SECONDS`, and then the server ends with an error.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import select
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

import uvicorn
from starlette.types import ASGIApp

from engine.errors import EngineError, StartupError, Unavailable
from engine.transport.process_memory import drop_library_pages
from gateway.access.intake import Intake
from gateway.batch.runner import BatchRunner
from gateway.generation.restored_streams import Later
from gateway.serve.acceptor import Acceptor, defer_silent
from gateway.serve.connection import ConnectionBounds
from gateway.serve.places import Places
from gateway.serve.process import return_large_blocks, tune_collector
from gateway.serve.upgrade import systemd
from gateway.serve.upgrade.channel import Predecessor, serve_control
from gateway.serve.upgrade.successor import Upgrades
from gateway.serve.uvicorn_server import UvicornServer
from gateway.serve.websocket import UpgradableConnection
from gateway.service import Service

T = TypeVar("T")
logger = logging.getLogger(__name__)

BACKLOG = 2048
CONNECTIONS_SHARE = 0.1  # share of the loop's time, for setting connections up beside generation
INTERRUPTED = 130
KEEP_ALIVE_SECONDS = 75
FLUSH_SECONDS = 5  # for the last bytes, after the last request has ended
FAILED_SECONDS = 5.0  # `/health` reports for so long that the engine has failed


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


def is_called(listener: socket.socket) -> bool:
    """Whether a client has connected to the socket, which listens from the first call on, and waits
    for the server to be ready."""
    listener.listen(BACKLOG)
    defer_silent(listener)
    return bool(select.select([listener], [], [], 0)[0])


class Signals:
    """SIGTERM and SIGINT as events, SIGHUP as a callback, inside its `with` block.

    `stop` is set by the first signal, `abort` by SIGINT or a second signal.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.abort = asyncio.Event()
        self.is_interrupt = False
        self.forward: Callable[[signal.Signals], object] = _ignore  # SIGTERM and SIGINT, too
        self._numbers = [signal.SIGTERM, signal.SIGINT]

    def on_hangup(self, reload: Callable[[], None]) -> None:
        """Call `reload` on SIGHUP. Without it SIGHUP ends the process."""
        self._numbers.append(signal.SIGHUP)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    def on_upgrade(self, upgrade: Callable[[], object]) -> None:
        """Call `upgrade` on SIGUSR2. Without it SIGUSR2 ends the process."""
        self._numbers.append(signal.SIGUSR2)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, upgrade)

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        self.forward(number)
        if number is signal.SIGINT and self.abort.is_set():
            logger.warning("second SIGINT: the process ends without waiting")
            os._exit(INTERRUPTED)  # the workers end when their pipes close
        if number is signal.SIGINT or self.stop.is_set():
            self.abort.set()
        if not self.stop.is_set():
            self.is_interrupt = number is signal.SIGINT
        self.stop.set()


def _ignore(number: signal.Signals) -> None:
    """There is no successor that would get the signal."""


async def unless_stopped(work: Coroutine[Any, Any, T], signals: Signals) -> T | None:
    """The result of `work`; None if a signal arrived first, which cancels `work`."""
    task = asyncio.create_task(work)
    done = await first_of(task, asyncio.create_task(signals.stop.wait()))
    return task.result() if task in done else None


async def first_of(*tasks: asyncio.Task[Any]) -> set[asyncio.Task[Any]]:
    """The tasks that end first; the others are cancelled, and have ended too."""
    try:
        return (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _nothing() -> None:
    """There is no stream to restore."""


async def _restore_nothing() -> Later:
    """The work that is left on a server without streams: none."""
    return _nothing


@dataclass(frozen=True, slots=True)
class Server:
    """An app and what its routes use, with the batch runner."""

    app: ASGIApp
    service: Service
    runner: BatchRunner
    drain_seconds: float
    bounds: ConnectionBounds = field(default_factory=ConnectionBounds)
    # Awaited before requests are accepted; its result is awaited beside them.
    restore: Callable[[], Awaitable[Later]] = _restore_nothing
    tls: ssl.SSLContext | None = None
    upgrades: Upgrades | None = None
    predecessor: Predecessor | None = None

    async def serve(
        self, listener: socket.socket, signals: Signals, on_ready: Callable[[], None]
    ) -> None:
        """Serve on the bound socket until a signal, then drain. Closes the socket.

        Raises `Unavailable` if the engine has failed.
        """
        server = UvicornServer(_config(self))
        places = Places(self.bounds.max_connections, self.bounds.max_per_network)
        listener.listen(BACKLOG)
        defer_silent(listener)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.service.groups.run())
            watching = group.create_task(self.service.watch.run())
            serving = group.create_task(server.serve([]))
            await server.listens.wait()
            acceptor = self._acceptor(server, places)
            tune_collector()
            return_large_blocks()
            drop_library_pages()
            later = await self._begin()
            restoring = group.create_task(later())
            batching = group.create_task(self._run_batches())
            accepting = group.create_task(acceptor.run(listener))
            if self.predecessor is not None:
                self.predecessor.took_over()
            on_ready()
            upgrading = group.create_task(self._upgrade_if_asked(listener, acceptor, signals))
            await self._until_stopped(signals)
            if self.upgrades is not None and self.upgrades.handed_over.is_set():
                upgrading.cancel()  # others ask the successor
                signals.on_upgrade(partial(self.upgrades.forward, signal.SIGUSR2))
                work = self._finish(server, acceptor, places, batching)
                await unless_stopped(work, signals)
            for task in (upgrading, restoring, batching):
                task.cancel()  # unfinished lines run after the next start
            await asyncio.wait((upgrading, batching, restoring))
            self._retire(server)
            await asyncio.gather(self._drain(signals), self._outlast_former())
            await self.service.store.held.close()
            accepting.cancel()
            server.exit()
            await serving
            running.cancel()
            watching.cancel()
        if self.service.groups.failure is not None:
            raise Unavailable(self.service.groups.failure)

    async def _begin(self) -> Later:
        """Restore what clients may ask for before any request is accepted, or be told by the former
        server that it accepts no more. Returns what goes on beside the requests."""
        if (predecessor := self.predecessor) is None:
            return await self.restore()
        await predecessor.take_over()

        async def restore() -> None:
            await (await self.restore())()
            await self.runner.resume()

        async def follow() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(predecessor.follow())
                group.create_task(predecessor.restored_by(restore))

        return follow

    async def _run_batches(self) -> None:
        if self.predecessor is not None:
            await self.predecessor.released.wait()
        await self.runner.run()

    async def _upgrade_if_asked(
        self, listener: socket.socket, acceptor: Acceptor, signals: Signals
    ) -> None:
        """Upgrade on SIGUSR2 and for `podway upgrade`, until cancelled."""
        if (upgrades := self.upgrades) is None:
            return
        signals.forward = upgrades.forward

        async def by_signal() -> None:
            with contextlib.suppress(EngineError):  # it is logged
                await upgrades.upgrade(None, listener, acceptor)

        async with asyncio.TaskGroup() as group:
            signals.on_upgrade(lambda: group.create_task(by_signal()))
            port = listener.getsockname()[1]
            await serve_control(port, lambda given: upgrades.upgrade(given, listener, acceptor))

    async def _finish(
        self,
        server: UvicornServer,
        acceptor: Acceptor,
        places: Places,
        batching: asyncio.Task[None],
    ) -> None:
        """Serve what has begun, while the successor accepts connections, until all has ended."""
        self._retire(server)
        self.service.groups.changes.end()
        private_places = Places()
        private = await self._serve_privately(server, private_places)
        self.runner.ending.set()
        await asyncio.wait((batching,))
        assert self.upgrades is not None, "called after the handover"
        self.upgrades.released()
        await acceptor.settled()
        await places.emptied()
        await self.service.store.held.finished()
        await private_places.emptied()
        private.close()

    def _retire(self, server: UvicornServer) -> None:
        """Have clients send what comes next over new connections, which another server may get."""
        self.bounds.retirement.has_begun = True
        for connection in list(server.server_state.connections):
            connection.retire()  # type: ignore[union-attr] # they are all ours

    async def _serve_privately(self, server: UvicornServer, places: Places) -> asyncio.Server:
        """Answer what the successor passes on of the streams that run here."""
        assert self.upgrades is not None, "called after the handover"
        app = importlib.import_module("gateway.serve.upgrade.forwarding")
        private = replace(self, app=app.PrivateApp(self.app, self.service, self.upgrades.secret))
        config = _config(private)
        config.load()
        make = self._maker(server, config)

        def connect() -> asyncio.Protocol:
            place = places.enter("")
            assert place is not None, "there is no bound"
            return make(place=place)

        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(connect, sock=self.upgrades.private)

    async def _until_stopped(self, signals: Signals) -> None:
        """Wait for a signal, for a successor, or until the engine has failed and `/health` has
        reported it."""
        ends = [signals.stop, self.service.groups.failed]
        if self.upgrades is not None:
            ends.append(self.upgrades.handed_over)
        await first_of(*(asyncio.create_task(event.wait()) for event in ends))
        if self.service.groups.failed.is_set() and not signals.stop.is_set():
            logger.error("%s The server ends in %g s.", self.service.groups.failure, FAILED_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(signals.stop.wait(), FAILED_SECONDS)

    def _maker(
        self, server: UvicornServer, config: uvicorn.Config
    ) -> partial[UpgradableConnection]:
        """Makes the connection of a `place`."""
        return partial(
            UpgradableConnection,
            config=config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
            bounds=self.bounds,
            log=self.service.request_log,
        )

    def _acceptor(self, server: UvicornServer, places: Places) -> Acceptor:
        make = self._maker(server, server.config)
        intake = Intake(
            self.service.request_log.clock,
            time.thread_time,
            lambda: self.service.groups.is_generating,
            lambda: self.service.watch.is_busy,
            share=CONNECTIONS_SHARE,
            busy_share=CONNECTIONS_SHARE,
        )
        return Acceptor(lambda place: make(place=place), places, intake, self.tls)

    async def _outlast_former(self) -> None:
        """Let the former server drain, too: systemd kills what is left when this one has ended."""
        former = self.predecessor
        if former is not None and not former.has_ended and systemd.is_notified():
            with contextlib.suppress(ProcessLookupError):
                os.kill(former.pid, signal.SIGTERM)
            await former.follow()

    async def _drain(self, signals: Signals) -> None:
        if not signals.abort.is_set():
            logger.info("draining: running requests may finish within %g s", self.drain_seconds)
        drained = self.service.groups.drain(self.drain_seconds)
        await first_of(asyncio.create_task(drained), asyncio.create_task(signals.abort.wait()))
        await self.service.groups.drain(0)


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
