"""The port of a launcher, which starts workers and connects to them."""

import socket
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.worker_settings import Placement


class WorkerExit(NamedTuple):
    """How a worker ended, as a predicate such as "ended with exit code 0".

    `is_kill`: by a signal that programs do not raise themselves and the server did not send.
    """

    description: str
    is_kill: bool = False


class LaunchedWorker(Protocol):
    """A started worker, which waits for its settings on a connected socket."""

    @property
    def placement(self) -> Placement: ...

    @property
    def connection(self) -> socket.socket:
        """The server's end of the socket, non-blocking."""

    @property
    def pid(self) -> int:
        """The process id on the machine that runs the worker."""

    def kill(self) -> None:
        """Send SIGKILL without waiting; `end` must still be called."""

    async def end(self, grace: float) -> WorkerExit:
        """Close the connection, kill the process if it does not exit within `grace` seconds, and
        release its resources. Idempotent."""


class Launcher(Protocol):
    """Starts all workers of a model together."""

    async def launch(self, num_stages: int, num_ranks: int) -> Sequence[LaunchedWorker]:
        """Start one worker for each stage and rank, in the order of `Placement.index`.

        Raises `StartupError`; then no worker is left running.
        """

    async def close(self) -> None:
        """Release what the workers share. `launch` must not be called afterwards."""


def placements(num_stages: int, num_ranks: int) -> list[Placement]:
    """The placements of a model's workers, in order of index. The launcher adds the addresses."""
    return [
        Placement(stage, num_stages, rank, num_ranks)
        for stage in range(num_stages)
        for rank in range(num_ranks)
    ]
