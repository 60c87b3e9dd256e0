"""Accepts connections, and gives each its protocol when its client's turn comes.

asyncio's own servers set up every connection at once, and know nothing of a TLS connection before
its handshake is complete. A client that connects and closes, or begins handshakes, as fast as it
can, would take most of the event loop's time before it sends a request. Here a connection is only
accepted at once. Setting it up, and its handshake, are metered as requests are: `Intake`.
A handshake begins when its first bytes have arrived.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.access.intake import Intake
from gateway.access.networks import network_of
from gateway.serve.arrival import Rejection
from gateway.serve.places import Place, Places
from gateway.serve.tls import charged_for_handshake

logger = logging.getLogger(__name__)

SETUP_SECONDS = 15.0  # until a connection has its protocol, TLS handshake included
SILENT_SECONDS = 1
ACCEPT_RETRY_SECONDS = 1.0
MAX_ACCEPTED = 16  # in one cycle of the loop
FULL = "The server has as many open connections as it allows, in total or for one address."


@dataclass(slots=True, eq=False)
class Acceptor:
    """Accepts connections on a listening socket while `run` runs; `make` makes their protocols."""

    make: Callable[[Place], asyncio.Protocol]
    places: Places
    intake: Intake
    tls: ssl.SSLContext | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)  # tasks that set a connection up
    _retry: asyncio.TimerHandle | None = None
    _listener: socket.socket | None = None  # while it runs

    async def run(self, listener: socket.socket) -> None:
        """Accept until cancelled, which closes the connections that have no protocol yet."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._listener = listener
        self.resume()
        try:
            await loop.create_future()
        finally:
            self.pause()
            self._listener = None
            for task in self._tasks:
                task.cancel()

    def pause(self) -> None:
        """Accept no more. What connects meanwhile waits in the kernel, for whoever accepts next."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def resume(self) -> None:
        """Accept again after `pause`."""
        if self._listener is not None:
            self._listen(asyncio.get_running_loop(), self._listener)

    async def settled(self) -> None:
        """Return when each connection that was accepted has its protocol, or is closed."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _listen(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        loop.add_reader(listener.fileno(), self._accept, loop, listener)

    def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        """Accept some of the connections that wait; the others in the next cycles of the loop."""
        for _ in range(MAX_ACCEPTED):
            try:
                peer, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # for instance, no more open files
                logger.error("cannot accept a connection: %s", error)
                loop.remove_reader(listener.fileno())
                self._retry = loop.call_later(ACCEPT_RETRY_SECONDS, self._listen, loop, listener)
                return
            peer.setblocking(False)
            if has_ended(peer):
                peer.close()
            else:
                self._begin(loop, peer, network_of(str(address[0])))

    def _begin(self, loop: asyncio.AbstractEventLoop, peer: socket.socket, network: str) -> None:
        place = self.places.enter(network)
        if place is None:
            if self.tls is None:
                refuse(peer)
            peer.close()
            return
        task = loop.create_task(self._set_up(loop, peer, place))
        place.close = task.cancel
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._is_set_up(task, peer, place))

    def _is_set_up(self, task: asyncio.Task[None], peer: socket.socket, place: Place) -> None:
        """Close what has not got a protocol, also if its task was cancelled before it began."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            place.leave()
            peer.close()
        if isinstance(error, OSError):  # includes TLS errors and the timeout
            logger.debug("a connection was not set up: %s", error)
        elif error is not None:
            logger.error("a connection was not set up", exc_info=error)

    async def _set_up(
        self, loop: asyncio.AbstractEventLoop, peer: socket.socket, place: Place
    ) -> None:
        """Give a connection its protocol, which leaves the place when the connection is lost."""
        async with asyncio.timeout(SETUP_SECONDS):
            if self.tls is not None:
                await readable(loop, peer)
            await self.intake.enter(place.network)
            if has_ended(peer):
                raise ConnectionAbortedError("its client has closed it")
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            charged_for_handshake.set((self.intake, place.network))
            work = loop.connect_accepted_socket(lambda: self.make(place), peer, ssl=self.tls)
            await self.intake.metered(work, None, place.network)


def defer_silent(listener: socket.socket) -> None:
    """Let the kernel keep connections for a second until their first bytes arrive (Linux), so that
    one that is closed at once never gets a place and a task."""
    if hasattr(socket, "TCP_DEFER_ACCEPT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_SECONDS)


def has_ended(peer: socket.socket) -> bool:
    """Whether the client has closed its side, or the connection, before it sent anything."""
    try:
        return not peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def readable(loop: asyncio.AbstractEventLoop, peer: socket.socket) -> None:
    """Wait until bytes of the client, or its end, have arrived."""
    has_bytes = asyncio.Event()
    loop.add_reader(peer.fileno(), has_bytes.set)
    try:
        await has_bytes.wait()
    finally:
        loop.remove_reader(peer.fileno())


def refuse(peer: socket.socket) -> None:
    """Send the error of a server that is full; the socket's buffer is empty and has room for it."""
    with contextlib.suppress(OSError):
        peer.send(Rejection(503, FULL, "server_error", "overloaded").response())
