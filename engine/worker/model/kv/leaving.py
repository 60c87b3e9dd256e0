"""Copies from the device that are stored on the host once they are there."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.step import Page
from engine.worker.ports import MovesInFlight
from engine.worker.transfers import Fetched

Stores = Callable[[Sequence[Tensor]], None]


class _Copy(NamedTuple):
    """Tensors on their way, and what takes them."""

    fetched: Fetched
    store: Stores


class Leaving:
    """Copies on their way to the host, in their order. One that is there is stored at once."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self._lock = threading.Lock()  # a step is launched while another one is collected

    def add(self, fetched: Fetched, store: Stores) -> None:
        """Store the tensors when they are on the host."""
        with self._lock:
            if not self._copies and fetched.is_here:
                store(fetched.wait())
            else:
                self._copies.append(_Copy(fetched, store))

    def wait(self) -> None:
        """Store all copies; waits for those that are not there."""
        with self._lock:
            for fetched, store in self._copies:
                store(fetched.wait())
            self._copies.clear()


@dataclass(frozen=True, slots=True)
class AfterLeaving:
    """The moves of a step, some of which are copies that leave."""

    leaving: Leaving
    others: tuple[MovesInFlight, ...]
    unread: tuple[Page, ...] = ()

    def wait(self) -> tuple[Page, ...]:
        """Wait for the copies too."""
        self.leaving.wait()
        return (*self.unread, *(page for other in self.others for page in other.wait()))
