"""Workers as Ray actors, spread over the nodes of a cluster.

Ray places the actors and sees to their end; what is said to them goes over TCP connections that
they open to the loop and on which both sides prove that they hold the launch's secret. The data
plane joins them at an address that the first of them listens on. Podway, its model and its
dependencies are expected on every node.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from engine.errors import StartupError
from engine.step import Placement
from engine.transport.handshake import HandshakeFailed, accept_worker
from engine.transport.launcher import placements
from engine.worker.process import remote

logger = logging.getLogger(__name__)

PLACING_SECONDS = 60.0  # for Ray to find room and start the processes
HANDSHAKE_SECONDS = 10.0
SECRET_BYTES = 32


class RayActor:
    """What runs inside an actor; made remote by the launcher."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def place(self) -> "Place":
        """Where Ray has put it."""
        return Place(ray.util.get_node_ip_address(), os.getpid())

    def listen(self) -> int:
        """Open the port at which the data plane meets, on all addresses; which it is."""
        self._listener = socket.create_server(("", 0))
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self, worker: str, loop: tuple[str, int], secret: bytes, index: int) -> int:
        """The worker's whole life: connect to the loop and obey. The exit code."""
        listener = None if self._listener is None else self._listener.fileno()
        return remote.serve(worker, loop, secret, index, listener)


@dataclass(frozen=True, slots=True)
class Place:
    """An actor's node and process."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class RayWorker:
    """A `LaunchedWorker`; `life` is Ray's reference to the answer of its `serve`."""

    placement: Placement
    connection: socket.socket
    pid: int
    actor: Any
    life: Any

    def kill(self) -> None:
        """See `LaunchedWorker`."""
        with contextlib.suppress(RayError):
            ray.kill(self.actor)

    async def end(self, grace: float) -> str:
        """See `LaunchedWorker`."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        try:
            return await asyncio.to_thread(self._outlast, grace)
        finally:
            self.kill()
            self.connection.close()

    def _outlast(self, grace: float) -> str:
        try:
            return f"ended with exit code {ray.get(self.life, timeout=grace)}"
        except GetTimeoutError:
            return "was killed"
        except RayError as error:
            return f"died: {' '.join(str(error).split())[:200]}"


class RayLauncher:
    """A `Launcher` on the cluster at `address`; `cpus` are reserved for each worker."""

    def __init__(self, worker: str, address: str, cpus: int) -> None:
        """Joins the cluster. Raises `StartupError` if there is none."""
        self._worker = worker
        self._cpus = cpus
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartupError(f"cannot join the Ray cluster at {address}: {error}") from error
        self._address = ray.util.get_node_ip_address()

    async def launch(self, num_stages: int, num_ranks: int) -> list[RayWorker]:
        """See `Launcher`. Ray spreads the workers over nodes while there are nodes."""
        make = ray.remote(num_cpus=self._cpus, scheduling_strategy="SPREAD")(RayActor)
        actors = [make.remote() for _ in range(num_stages * num_ranks)]
        try:
            places, port = await asyncio.to_thread(self._settle, actors)
            return await self._meet(actors, places, port, placements(num_stages, num_ranks))
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise

    async def close(self) -> None:
        """Leave the cluster."""
        await asyncio.to_thread(ray.shutdown)

    def _settle(self, actors: Sequence[Any]) -> tuple[list[Place], int]:
        """Wait until every actor has a process; where they are, and the port of the first."""
        try:
            places: list[Place] = ray.get(
                [actor.place.remote() for actor in actors], timeout=PLACING_SECONDS
            )
            port: int = ray.get(actors[0].listen.remote(), timeout=PLACING_SECONDS)
        except GetTimeoutError as error:
            raise StartupError(
                f"the Ray cluster has no room for {len(actors)} workers of {self._cpus} CPUs"
            ) from error
        except RayError as error:
            raise StartupError(f"Ray could not start the workers: {error}") from error
        return places, port

    async def _meet(
        self, actors: Sequence[Any], places: Sequence[Place], port: int, seats: list[Placement]
    ) -> list[RayWorker]:
        """Have every actor connect, and let in those that hold the secret."""
        secret = secrets.token_bytes(SECRET_BYTES)
        neighbours = Counter(place.address for place in places)
        with socket.create_server((self._address, 0)) as listener:
            listener.setblocking(False)
            where = listener.getsockname()[:2]
            lives = [
                actor.serve.remote(self._worker, where, secret, index)
                for index, actor in enumerate(actors)
            ]
            connections = await self._admit_all(listener, secret, lives)
        return [
            RayWorker(
                placement=replace(
                    seat,
                    rendezvous=f"{places[0].address}:{port}" if len(seats) > 1 else "",
                    address=place.address,
                    num_local_workers=neighbours[place.address],
                    local_index=[other.address for other in places[: seat.index]].count(
                        place.address
                    ),
                ),
                connection=connections[seat.index],
                pid=place.pid,
                actor=actors[seat.index],
                life=lives[seat.index],
            )
            for seat, place in zip(seats, places, strict=True)
        ]

    async def _admit_all(
        self, listener: socket.socket, secret: bytes, lives: Sequence[Any]
    ) -> dict[int, socket.socket]:
        """Let everybody in who holds the secret, until all workers are here."""
        loop = asyncio.get_running_loop()
        connections: dict[int, socket.socket] = {}
        try:
            async with asyncio.timeout(PLACING_SECONDS):
                while len(connections) < len(lives):
                    connection, peer = await loop.sock_accept(listener)
                    index = await _admit_one(connection, secret, str(peer))
                    if index is not None:
                        connections[index] = connection
        except BaseException as error:
            for connection in connections.values():
                connection.close()
            if not isinstance(error, TimeoutError):
                raise
            raise StartupError(
                f"{len(connections)} of {len(lives)} workers connected to {self._address}: "
                f"{await asyncio.to_thread(_why, lives)}"
            ) from error
        return connections


def _why(lives: Sequence[Any]) -> str:
    """What ended a worker before it connected, if one did."""
    ended, _ = ray.wait(list(lives), timeout=0)
    try:
        ray.get(ended)
    except RayError as error:
        return " ".join(str(error).split())[-300:]
    return "the others said nothing"


async def _admit_one(connection: socket.socket, secret: bytes, peer: str) -> int | None:
    """Who came, None for a stranger, who is shown the door."""
    connection.setblocking(False)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            return await accept_worker(connection, secret)
    except (HandshakeFailed, OSError, TimeoutError) as error:
        logger.warning("a stranger at %s was turned away: %s", peer, error)
        connection.close()
        return None
