import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from engine.transport.handshake import CHALLENGE_BYTES, HandshakeFailed, accept_worker, authenticate

SECRET, OTHER = b"s" * 32, b"o" * 32


@dataclass
class Ends:
    loop: socket.socket  # non-blocking
    worker: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A TCP connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = socket.create_connection(listener.getsockname())
        loop, _ = listener.accept()
    loop.setblocking(False)
    with loop, worker:
        yield Ends(loop, worker)


async def test_a_worker_with_the_secret_is_accepted_with_its_index(ends: Ends) -> None:
    authenticating = asyncio.to_thread(authenticate, ends.worker, SECRET, 513)
    index, _ = await asyncio.gather(accept_worker(ends.loop, SECRET), authenticating)
    assert index == 513
    assert ends.loop.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_worker_with_another_secret_is_rejected(ends: Ends) -> None:
    authenticating = asyncio.create_task(asyncio.to_thread(authenticate, ends.worker, OTHER, 0))
    with pytest.raises(HandshakeFailed, match="does not know the secret"):
        await accept_worker(ends.loop, SECRET)
    ends.loop.close()
    with pytest.raises((HandshakeFailed, ConnectionError)):
        await authenticating


async def test_a_worker_rejects_a_server_with_another_secret(ends: Ends) -> None:
    authenticating = asyncio.create_task(asyncio.to_thread(authenticate, ends.worker, SECRET, 0))
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ends.loop, bytes(CHALLENGE_BYTES))
    await loop.sock_recv(ends.loop, 1 << 10)
    await loop.sock_sendall(ends.loop, bytes(32))
    with pytest.raises(HandshakeFailed, match="the server does not know the secret"):
        await authenticating


async def test_a_proof_is_not_valid_on_another_connection(ends: Ends) -> None:
    authenticating = asyncio.create_task(asyncio.to_thread(authenticate, ends.worker, SECRET, 0))
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ends.loop, bytes(CHALLENGE_BYTES))
    recorded = await loop.sock_recv(ends.loop, 1 << 10)
    ends.loop.close()
    with pytest.raises((HandshakeFailed, ConnectionError)):
        await authenticating
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(recorded)
        with pytest.raises(HandshakeFailed, match="does not know the secret"):
            await accept_worker(ours, SECRET)


async def test_a_peer_that_closes_the_connection_is_rejected(ends: Ends) -> None:
    ends.worker.close()
    with pytest.raises((HandshakeFailed, ConnectionError)):
        await accept_worker(ends.loop, SECRET)
