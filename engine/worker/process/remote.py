"""A worker inside another process, such as a Ray actor: it connects to the engine by TCP."""

import logging
import socket

from engine.errors import WorkerLost
from engine.transport.handshake import authenticate
from engine.transport.wire import WireError
from engine.worker.process.entry import Parent
from engine.worker.process.entry import serve as converse

logger = logging.getLogger("engine.worker")

CONNECTING_SECONDS = 10.0


def serve(
    worker: str, loop: tuple[str, int], secret: bytes, index: int, listener: int | None
) -> int:
    """Serve the engine at `loop` until it closes the connection; returns the exit code.

    `listener` is the socket at which the data plane meets, a file descriptor of this process.
    Raises `NotOneOfUs` when the engine does not know the secret.
    """
    with socket.create_connection(loop, CONNECTING_SECONDS) as connection:
        authenticate(connection, secret, index)
        connection.settimeout(None)
        try:
            return converse(Parent(connection), worker, listener)
        except (EOFError, ConnectionError):
            return 0
        except (WorkerLost, WireError) as error:
            logger.error("the worker stops: %s", error)
            return 1
