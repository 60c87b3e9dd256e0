"""TLS: a certificate and its key from two files, and the listener of TLS connections."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import StartupError

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 15.0
ACCEPT_RETRY_SECONDS = 1.0


class Certificate:
    """The server's certificate chain and private key. `reload` changes `context` in place.

    Raises `StartupError` if the files are not a certificate and its key.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self.context = _context(certificate, key)

    def reload(self) -> None:
        """Read the files again, for new connections. If they are invalid, the old certificate stays
        in use. Both cases are logged."""
        try:
            _context(*self._files)  # an invalid pair would damage the context in use
            self.context.load_cert_chain(*self._files)
        except StartupError as error:
            logger.error("keeping the old certificate: %s", error)
        else:
            logger.info("reloaded the certificate %s", self._files[0])


@dataclass(slots=True, eq=False)
class TlsListener:
    """Accepts connections and runs their handshakes, then `make` makes their HTTP protocol.

    asyncio's own TLS servers know nothing of a connection before its handshake is complete. Here
    it counts against the limit on connections from the start.
    """

    context: ssl.SSLContext
    make: Callable[[], asyncio.Protocol]
    connections: Collection[object]  # those whose handshake is complete
    max_connections: int
    _handshakes: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, listener: socket.socket) -> None:
        """Accept until cancelled, which aborts the handshakes in progress."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    peer, _ = await loop.sock_accept(listener)
                except OSError as error:  # for instance, no more open files
                    logger.error("cannot accept a connection: %s", error)
                    await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                else:
                    self._begin(peer)
        finally:
            for task in self._handshakes:
                task.cancel()

    def _begin(self, peer: socket.socket) -> None:
        if len(self.connections) + len(self._handshakes) >= self.max_connections:
            peer.close()
            return
        task = asyncio.get_running_loop().create_task(self._handshake(peer))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self.make,
                peer,
                ssl=self.context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
            )
        except OSError as error:  # includes TLS errors and the timeout
            logger.debug("TLS handshake failed: %s", error)


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_reject_passphrase)
    except ssl.SSLError as error:
        reason = error.reason or "they are not PEM"
        raise StartupError(f"cannot use {certificate} with {key} for TLS: {reason}") from error
    except OSError as error:
        raise StartupError(
            f"cannot read {certificate} and {key} for TLS: {error.strerror}"
        ) from error
    return context


def _reject_passphrase() -> str:
    """OpenSSL calls this for an encrypted key, which would otherwise prompt on the terminal."""
    raise StartupError("the TLS key has a passphrase: --tls-key must be a key without one")
