import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import uvloop

from gateway.access.intake import Intake
from gateway.serve.acceptor import Acceptor, defer_silent, has_ended, readable
from gateway.serve.places import Place, Places
from gateway.serve.server import bind
from gateway.serve.tls import Certificate
from tests.certificates import make_certificate
from tests.gateway.scenes import plays

ATTACKER, HONEST = "127.0.0.2", "127.0.0.1"
Scene = Callable[["Server"], Awaitable[None]]


@dataclass(slots=True, eq=False)
class NotedIntake(Intake):
    """Notes which clients are charged."""

    charged: list[str] = field(default_factory=list)

    def charge(self, seconds: float, client: str = "") -> None:
        self.charged.append(client)
        Intake.charge(self, seconds, client)


class Greeting(asyncio.Protocol):
    """Sends a byte when the connection is set up."""

    def __init__(self, server: "Server", place: Place) -> None:
        self._server = server
        self._place = place

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._place.begin()
        self._server.made.append(self._place.network)
        cast("asyncio.WriteTransport", transport).write(b"!")

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        self._server.lost.set()


class Server:
    """An acceptor beside an engine that generates, on a clock that stands still."""

    def __init__(self, port: int, tls: ssl.SSLContext | None, places: Places) -> None:
        self.port = port
        self.now = 0.0
        self.made: list[str] = []
        self.clients: list[asyncio.StreamWriter] = []
        self.lost = asyncio.Event()
        self.places = places
        self.intake = NotedIntake(lambda: self.now, lambda: self.now, lambda: True)
        self.acceptor = Acceptor(lambda place: Greeting(self, place), places, self.intake, tls)

    async def connect(
        self, address: str = HONEST, tls: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(address, 0), ssl=tls
        )
        self.clients.append(writer)
        return reader, writer


def play(scene: Scene, tls: ssl.SSLContext | None = None, places: Places | None = None) -> None:
    async def main() -> None:
        with bind("127.0.0.1", 0) as listener:
            listener.listen()
            server = Server(listener.getsockname()[1], tls, places or Places())
            accepting = asyncio.create_task(server.acceptor.run(listener))
            try:
                async with asyncio.timeout(30):
                    await scene(server)
            finally:
                for writer in server.clients:
                    writer.close()
                accepting.cancel()
                await asyncio.wait((accepting,))

    uvloop.run(main())


@plays(play)
async def test_connections_of_a_client_that_took_much_time_wait_and_those_of_others_do_not(
    server: Server,
) -> None:
    server.intake.charge(1.0, ATTACKER)
    server.now = 1.0  # the debt of all clients together is repaid
    late, _ = await server.connect(ATTACKER)
    reader, _ = await server.connect()
    assert await reader.read(1) == b"!"
    assert server.made == [HONEST]
    server.now = 100.0
    assert await late.read(1) == b"!"


@plays(play)
async def test_a_client_that_connects_and_closes_costs_no_protocol_and_keeps_no_place(
    server: Server,
) -> None:
    server.intake.charge(1.0, ATTACKER)
    server.now = 1.0
    for _ in range(20):
        _, gone = await server.connect(ATTACKER)
        gone.transport.abort()
    server.now = 100.0
    reader, _ = await server.connect(ATTACKER)
    assert await reader.read(1) == b"!"
    assert server.made == [ATTACKER]
    assert server.places.num_open == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="only Linux defers")
async def test_a_silent_connection_is_accepted_with_its_first_bytes_or_its_end() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        listener.setblocking(False)
        defer_silent(listener)
        for sent in (b"G", b""):
            with socket.create_connection(listener.getsockname()) as client:
                with pytest.raises(BlockingIOError):
                    listener.accept()
                if sent:
                    client.sendall(sent)
                else:
                    client.shutdown(socket.SHUT_WR)
                await readable(asyncio.get_running_loop(), listener)
                peer, _ = listener.accept()
                with peer:
                    assert has_ended(peer) is not bool(sent)


def test_the_time_of_a_handshake_is_charged_to_its_client(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    trust = ssl.create_default_context(cafile=certificate)

    async def scene(server: Server) -> None:
        reader, _ = await server.connect(ATTACKER, trust)
        assert await reader.read(1) == b"!"
        assert len(server.intake.charged) > 1, "setting it up, and the steps of its handshake"
        assert set(server.intake.charged) == {ATTACKER}

    play(scene, Certificate(certificate, key).context)


def test_a_handshake_begins_with_the_first_bytes_of_its_client(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    trust = ssl.create_default_context(cafile=certificate)

    async def scene(server: Server) -> None:
        silent, _ = await server.connect(ATTACKER)
        reader, _ = await server.connect(tls=trust)
        assert await reader.read(1) == b"!"
        assert server.places.num_open == 2
        again, _ = await server.connect(tls=trust)
        assert await silent.read() == b""
        assert await again.read(1) == b"!"

    play(scene, Certificate(certificate, key).context, Places(2))


def test_a_client_without_a_place_gets_a_503() -> None:
    async def scene(server: Server) -> None:
        reader, writer = await server.connect()
        assert await reader.read(1) == b"!"
        late, _ = await server.connect()
        response = await late.read()
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in response
        assert b'"overloaded"' in response
        writer.close()
        await server.lost.wait()
        again, _ = await server.connect()
        assert await again.read(1) == b"!"

    play(scene, None, Places(9, max_per_network=1))
