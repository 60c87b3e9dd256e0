"""Mutual authentication on a TCP connection: server and worker prove that they know a secret.

    server -> worker   challenge
    worker -> server   its index, its own challenge, HMAC(secret, "worker", index, both challenges)
    server -> worker   HMAC(secret, "loop", index, both challenges)

The secret is never sent. Later messages are neither encrypted nor signed: the network between the
machines of a cluster may read tokens, but a peer without the secret cannot take part.
"""

import asyncio
import hmac
import secrets
import socket
import struct

CHALLENGE_BYTES = 32
PROOF_BYTES = 32
INDEX = struct.Struct(">I")
REPLY_BYTES = INDEX.size + CHALLENGE_BYTES + PROOF_BYTES
KEEPALIVE_SECONDS = 10


class HandshakeFailed(Exception):
    """The peer does not know the secret, or closed the connection during the handshake."""


async def accept_worker(connection: socket.socket, secret: bytes) -> int:
    """The server's side, on a non-blocking socket. Returns the index of the worker.

    Raises `HandshakeFailed` or `OSError`. The caller sets the time limit.
    """
    loop = asyncio.get_running_loop()
    ours = secrets.token_bytes(CHALLENGE_BYTES)
    await loop.sock_sendall(connection, ours)
    reply = b""
    while len(reply) < REPLY_BYTES:
        piece = await loop.sock_recv(connection, REPLY_BYTES - len(reply))
        if not piece:
            raise HandshakeFailed("the peer closed the connection")
        reply += piece
    index, rest = reply[: INDEX.size], reply[INDEX.size :]
    theirs, proof = rest[:CHALLENGE_BYTES], rest[CHALLENGE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"worker", index, ours, theirs)):
        raise HandshakeFailed("the peer does not know the secret")
    await loop.sock_sendall(connection, _proof(secret, b"loop", index, ours, theirs))
    _tune(connection)
    return int(INDEX.unpack(index)[0])


def authenticate(connection: socket.socket, secret: bytes, index: int) -> None:
    """The worker's side, on a blocking socket. Raises `HandshakeFailed` or `OSError`."""
    challenge = _receive(connection, CHALLENGE_BYTES)
    ours, packed = secrets.token_bytes(CHALLENGE_BYTES), INDEX.pack(index)
    connection.sendall(packed + ours + _proof(secret, b"worker", packed, challenge, ours))
    proof = _receive(connection, PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"loop", packed, challenge, ours)):
        raise HandshakeFailed("the server does not know the secret")
    _tune(connection)


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"podway".join(parts), "sha256")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        piece = connection.recv(num_bytes - len(received))
        if not piece:
            raise HandshakeFailed("the server closed the connection")
        received += piece
    return received


def _tune(connection: socket.socket) -> None:
    """Send small frames at once, and detect a peer machine that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
