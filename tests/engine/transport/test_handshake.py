"""Both ends of a connection prove that they hold the secret, or part."""

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


async def test_who_holds_the_secret_is_let_in_by_its_index(ends: Ends) -> None:
    introducing = asyncio.to_thread(authenticate, ends.worker, SECRET, 513)
    index, _ = await asyncio.gather(accept_worker(ends.loop, SECRET), introducing)
    assert index == 513
    assert ends.loop.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_worker_with_another_secret_is_turned_away(ends: Ends) -> None:
    introducing = asyncio.create_task(asyncio.to_thread(authenticate, ends.worker, OTHER, 0))
    with pytest.raises(HandshakeFailed, match="does not hold the secret"):
        await accept_worker(ends.loop, SECRET)
    ends.loop.close()
    with pytest.raises((HandshakeFailed, ConnectionError)):
        await introducing


async def test_a_worker_does_not_obey_a_loop_with_another_secret(ends: Ends) -> None:
    introducing = asyncio.create_task(asyncio.to_thread(authenticate, ends.worker, SECRET, 0))
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ends.loop, bytes(CHALLENGE_BYTES))
    await loop.sock_recv(ends.loop, 1 << 10)
    await loop.sock_sendall(ends.loop, bytes(32))
    with pytest.raises(HandshakeFailed, match="the loop does not hold the secret"):
        await introducing


async def test_the_proof_of_one_connection_opens_no_other(ends: Ends) -> None:
    introducing = asyncio.create_task(asyncio.to_thread(authenticate, ends.worker, SECRET, 0))
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ends.loop, bytes(CHALLENGE_BYTES))
    overheard = await loop.sock_recv(ends.loop, 1 << 10)
    ends.loop.close()
    with pytest.raises((HandshakeFailed, ConnectionError)):
        await introducing
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(overheard)
        with pytest.raises(HandshakeFailed, match="does not hold the secret"):
            await accept_worker(ours, SECRET)


async def test_who_hangs_up_is_no_worker(ends: Ends) -> None:
    ends.worker.close()
    with pytest.raises((HandshakeFailed, ConnectionError)):
        await accept_worker(ends.loop, SECRET)
