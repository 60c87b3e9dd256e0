"""How workers come to be and how one reaches them: what a transport asks of a launcher."""

import socket
from collections.abc import Sequence
from typing import Protocol

from engine.step import Placement


class LaunchedWorker(Protocol):
    """A worker that waits for its settings at the other end of a connected socket."""

    @property
    def placement(self) -> Placement: ...

    @property
    def connection(self) -> socket.socket:
        """Ours; it does not block."""
        ...

    @property
    def pid(self) -> int:
        """Its process, on whatever machine that is."""
        ...

    def kill(self) -> None:
        """End it now, without waiting; `end` is still to come."""
        ...

    async def end(self, grace: float) -> str:
        """Hang up, and push whoever does not leave within `grace` seconds; free all there is.

        Returns how it ended, as the rest of a sentence. Idempotent.
        """
        ...


class Launcher(Protocol):
    """Starts all workers of a model together."""

    async def launch(self, num_stages: int, num_ranks: int) -> Sequence[LaunchedWorker]:
        """One worker for each stage and rank, in the order of `Placement.index`.

        Raises `StartupError`, leaving nothing behind.
        """
        ...

    async def close(self) -> None:
        """Give back what belongs to no single worker; nothing is launched any more."""
        ...


def placements(num_stages: int, num_ranks: int) -> list[Placement]:
    """The places of a model's workers, in order; where they meet is the launcher's to say."""
    return [
        Placement(stage, num_stages, rank, num_ranks)
        for stage in range(num_stages)
        for rank in range(num_ranks)
    ]
