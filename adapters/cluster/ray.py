"""Workers as Ray actors, spread over the nodes of a cluster.

Ray places and ends the actors. Steps and results go over TCP connections that the actors open to
the server, on which both sides prove that they know the secret of this launch. The data plane
meets at an address on which the first actor listens. Podway, the model and the dependencies must
be installed on every node.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from engine.errors import StartupError
from engine.transport.handshake import HandshakeFailed, accept_worker
from engine.transport.launcher import WorkerExit, placements
from engine.worker.process import remote
from engine.worker_settings import Placement

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 60.0  # for Ray to find resources and start the processes
HANDSHAKE_SECONDS = 10.0
SECRET_BYTES = 32


class RayActor:
    """The class that runs inside an actor; the launcher makes it remote."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def place(self) -> "Place":
        """The node and process that Ray has chosen."""
        return Place(ray.util.get_node_ip_address(), os.getpid())

    def listen(self) -> int:
        """Listen for the data plane on all addresses; returns the port."""
        self._listener = socket.create_server(("", 0))
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self, worker: str, loop: tuple[str, int], secret: bytes, index: int) -> int:
        """Connect to the server and run steps until it says goodbye. Returns the exit code."""
        listener = None if self._listener is None else self._listener.fileno()
        return remote.serve(worker, loop, secret, index, listener)


@dataclass(frozen=True, slots=True)
class Place:
    """An actor's node and process."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class RayWorker:
    """A `LaunchedWorker`; `serving` is Ray's reference to the return value of its `serve`."""

    placement: Placement
    connection: socket.socket
    pid: int
    actor: Any
    serving: Any

    def kill(self) -> None:
        """Kill the actor without waiting."""
        with contextlib.suppress(RayError):
            ray.kill(self.actor)

    async def end(self, grace: float) -> WorkerExit:
        """Close the connection and kill the actor if it does not exit within `grace` seconds."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        try:
            return WorkerExit(await asyncio.to_thread(self._wait_for_exit, grace))
        finally:
            self.kill()
            self.connection.close()

    def _wait_for_exit(self, grace: float) -> str:
        try:
            return f"ended with exit code {ray.get(self.serving, timeout=grace)}"
        except GetTimeoutError:
            return "was killed"
        except RayError as error:
            return f"died: {' '.join(str(error).split())[:200]}"


class Membership:
    """This process is on one cluster from its first launcher's start to the end of the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # models are loaded and closed in threads
        self._address = ""
        self._num_launchers = 0

    def join(self, address: str) -> None:
        """Raises `StartupError` if there is no cluster at `address`."""
        with self._lock:
            if self._num_launchers and address != self._address:
                raise StartupError(
                    f"--ray-address {address}: this server's other workers are on the Ray cluster "
                    f"at {self._address}, and a server has one cluster"
                )
            if not self._num_launchers:
                try:
                    ray.init(address=address, logging_level=logging.WARNING)
                except (ConnectionError, RuntimeError, ValueError) as error:
                    raise StartupError(
                        f"cannot join the Ray cluster at {address}: {error}"
                    ) from error
            self._address = address
            self._num_launchers += 1

    def leave(self) -> None:
        """One launcher less."""
        with self._lock:
            self._num_launchers -= 1
            if not self._num_launchers:
                ray.shutdown()


MEMBERSHIP = Membership()


class RayLauncher:
    """A `Launcher` on the cluster at `address`; `cpus` and `gpus` are reserved for each worker.

    Ray shows a worker only the GPU that it has reserved, as `cuda:0`.
    """

    def __init__(self, worker: str, address: str, cpus: int, gpus: int = 0) -> None:
        """Join the cluster. Raises `StartupError` if there is none at `address`."""
        self._worker = worker
        self._cpus = cpus
        self._gpus = gpus
        self._has_left = False
        MEMBERSHIP.join(address)
        self._address = ray.util.get_node_ip_address()

    async def launch(self, num_stages: int, num_ranks: int) -> list[RayWorker]:
        """Start one actor per worker; Ray spreads them over as many nodes as there are."""
        resources = {"num_cpus": self._cpus, "num_gpus": self._gpus}
        make = ray.remote(**resources, scheduling_strategy="SPREAD")(RayActor)
        actors = [make.remote() for _ in range(num_stages * num_ranks)]
        try:
            places, port = await asyncio.to_thread(self._await_placement, actors)
            return await self._connect(actors, places, port, placements(num_stages, num_ranks))
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise

    async def close(self) -> None:
        """Leave the cluster, if no other launcher is on it. Idempotent."""
        if not self._has_left:
            self._has_left = True
            await asyncio.to_thread(MEMBERSHIP.leave)

    def _await_placement(self, actors: Sequence[Any]) -> tuple[list[Place], int]:
        """Wait until every actor has a process. Returns their places and the first one's port."""
        try:
            places: list[Place] = ray.get(
                [actor.place.remote() for actor in actors], timeout=PLACEMENT_SECONDS
            )
            port: int = ray.get(actors[0].listen.remote(), timeout=PLACEMENT_SECONDS)
        except GetTimeoutError as error:
            raise StartupError(
                f"the Ray cluster did not place {len(actors)} workers of {self._cpus} CPUs "
                f"and {self._gpus} GPUs within {PLACEMENT_SECONDS:g} s"
            ) from error
        except RayError as error:
            raise StartupError(f"Ray could not start the workers: {error}") from error
        return places, port

    async def _connect(
        self, actors: Sequence[Any], places: Sequence[Place], port: int, seats: list[Placement]
    ) -> list[RayWorker]:
        """Make every actor connect to this process and authenticate itself."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with socket.create_server((self._address, 0)) as listener:
            listener.setblocking(False)
            where = listener.getsockname()[:2]
            serving = [
                actor.serve.remote(self._worker, where, secret, index)
                for index, actor in enumerate(actors)
            ]
            connections = await self._accept_all(listener, secret, serving)
        return [
            RayWorker(
                placement=located(seat, places, port, has_gpus=self._gpus > 0),
                connection=connections[seat.index],
                pid=place.pid,
                actor=actors[seat.index],
                serving=serving[seat.index],
            )
            for seat, place in zip(seats, places, strict=True)
        ]

    async def _accept_all(
        self, listener: socket.socket, secret: bytes, serving: Sequence[Any]
    ) -> dict[int, socket.socket]:
        """Accept connections until all workers have authenticated. Sockets by worker index."""
        loop = asyncio.get_running_loop()
        connections: dict[int, socket.socket] = {}
        try:
            async with asyncio.timeout(PLACEMENT_SECONDS):
                while len(connections) < len(serving):
                    connection, peer = await loop.sock_accept(listener)
                    index = await _authenticated_index(connection, secret, str(peer))
                    if index is not None:
                        connections[index] = connection
        except BaseException as error:
            for connection in connections.values():
                connection.close()
            if not isinstance(error, TimeoutError):
                raise
            raise StartupError(
                f"only {len(connections)} of {len(serving)} workers connected to "
                f"{self._address}: {await asyncio.to_thread(_error_of, serving)}"
            ) from error
        return connections


def located(seat: Placement, places: Sequence[Place], port: int, *, has_gpus: bool) -> Placement:
    """The placement with its node; the first worker listens on `port`.

    Workers with a GPU of their own do not count those beside them: each sees one GPU.
    """
    address = places[seat.index].address
    before = [other.address for other in places[: seat.index]].count(address)
    everywhere = Counter(place.address for place in places)
    return replace(
        seat,
        rendezvous=f"{places[0].address}:{port}" if len(places) > 1 else "",
        address=address,
        num_local_workers=1 if has_gpus else everywhere[address],
        local_index=0 if has_gpus else before,
    )


def _error_of(serving: Sequence[Any]) -> str:
    """The error of a worker that ended before it connected, if one did."""
    ended, _ = ray.wait(list(serving), timeout=0)
    try:
        ray.get(ended)
    except RayError as error:
        return " ".join(str(error).split())[-300:]
    return "the others reported no error"


async def _authenticated_index(connection: socket.socket, secret: bytes, peer: str) -> int | None:
    """The index of the worker that connected; None if authentication failed."""
    connection.setblocking(False)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            return await accept_worker(connection, secret)
    except (HandshakeFailed, OSError, TimeoutError) as error:
        logger.warning("rejected an unauthenticated connection from %s: %s", peer, error)
        connection.close()
        return None
