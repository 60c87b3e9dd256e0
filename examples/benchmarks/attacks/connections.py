"""Attacks below HTTP's requests, without an API key: connections, handshakes, framing."""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable

from examples.benchmarks.attacks.sending import Attack, Attacker, trusting

CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
IDLE_SOCKETS = 300


async def each(attacker: Attacker, one: Callable[[], Awaitable[None]], clients: int) -> None:
    """Call `one`, `clients` at a time, until the attack is over; lost connections are outcomes."""

    async def again(_: int) -> None:
        try:
            await one()
        except (OSError, asyncio.IncompleteReadError) as error:
            attacker.outcomes[type(error).__name__] += 1
            await asyncio.sleep(0.01)

    await attacker.repeat(again, clients)


def bursts(block: bytes, clients: int = 4) -> Attack:
    """Connections that send a block, read what comes for 0.3 s, and close."""

    async def attack(attacker: Attacker) -> None:
        async def one() -> None:
            reader, writer = await attacker.connect()
            reading = asyncio.create_task(read_all(reader))
            writer.write(block)
            await asyncio.sleep(0.3)
            reading.cancel()
            writer.transport.abort()
            attacker.outcomes["bursts"] += 1

        await each(attacker, one, clients)

    return attack


def endless(head: bytes, block: bytes) -> Attack:
    """Connections that send a block again and again, until they are closed."""

    async def attack(attacker: Attacker) -> None:
        async def one() -> None:
            _, writer = await attacker.connect()
            try:
                writer.write(head)
                while not attacker.is_over:
                    writer.write(block)
                    await writer.drain()
                    attacker.outcomes["blocks"] += 1
            finally:
                writer.transport.abort()

        await each(attacker, one, 4)

    return attack


async def read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 20):
        pass


async def connect_and_close(attacker: Attacker) -> None:
    """Connections that are closed at once."""

    async def one() -> None:
        _, writer = await attacker.connect()
        writer.transport.abort()
        attacker.outcomes["connections"] += 1

    await each(attacker, one, 8)


async def idle_sockets(attacker: Attacker) -> None:
    """Connections that send nothing, more than the server allows."""
    writers = []
    for _ in range(IDLE_SOCKETS):
        with contextlib.suppress(OSError):
            writers.append((await attacker.connect())[1])
            attacker.outcomes["connections"] += 1
    await attacker.until_over()
    for writer in writers:
        writer.transport.abort()


async def whole_handshakes(attacker: Attacker) -> None:
    """TLS handshakes, each on a new connection, which is closed then."""

    async def one() -> None:
        _, writer = await attacker.connect(tls=trusting())
        writer.transport.abort()
        attacker.outcomes["handshakes"] += 1

    await each(attacker, one, 16)


async def client_hellos(attacker: Attacker) -> None:
    """The first message of a handshake; the server's answer, a signature, is not read."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()

    async def one() -> None:
        reader, writer = await attacker.connect()
        writer.write(hello)
        await reader.read(100)
        writer.transport.abort()
        attacker.outcomes["handshakes"] += 1

    await each(attacker, one, 16)


def pipelined(head: bytes, body: bytes, times: int) -> bytes:
    return (head + b"host: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body) * times


PIPELINED_POSTS = bursts(pipelined(b"POST /x HTTP/1.1\r\n", b"a" * 40, 2800))
PIPELINED_GETS = bursts(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 1500)
MANY_HEADERS = bursts((b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a:b\r\n" * 9000 + b"\r\n") * 4)
EXTENSIONS = endless(CHUNKED + b"5;", b"a=b;" * 65536)
SMALL_CHUNKS = endless(CHUNKED, b"1\r\na\r\n" * 16384)
