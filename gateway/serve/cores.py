"""The cores of this machine, divided among the replicas of a model.

Each replica gets cores of one NUMA node where their numbers allow it, and both threads of a core.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from engine.errors import StartupError
from gateway.settings.settings import Settings

NODES = Path("/sys/devices/system/node")
TOPOLOGY = Path("/sys/devices/system/cpu")


class Core(NamedTuple):
    """A hardware thread: the place of its node and of its physical core, and its own number."""

    node: int
    core: int
    number: int


def count_replicas(settings: Settings) -> int:
    """The number of replicas. Raises `StartupError` if there are not enough cores for them."""
    count = settings.launch.replicas
    if count == 1 or settings.launch.launcher != "local":
        return count
    cores = cores_of_machine()
    if count > len(cores):
        raise StartupError(
            f"--replicas {count}: each replica needs a core, and this process may use {len(cores)}"
        )
    return count or num_nodes(cores)


def cores_of_machine() -> list[Core]:
    """The cores that this process may use, those of one node one after the other."""
    if not hasattr(os, "sched_getaffinity"):
        return [Core(0, number, number) for number in range(os.cpu_count() or 1)]
    nodes = {
        number: int(path.parent.name.removeprefix("node"))
        for path in NODES.glob("node[0-9]*/cpulist")
        for number in parse_list(path.read_text())
    }
    allowed = os.sched_getaffinity(0)
    return sorted(Core(nodes.get(number, 0), _first_thread(number), number) for number in allowed)


def num_nodes(cores: Sequence[Core]) -> int:
    """The NUMA nodes with such cores."""
    return len({core.node for core in cores})


def divide(cores: Sequence[Core], count: int) -> list[tuple[int, ...]]:
    """The numbers of the cores of each of `count` replicas, which are at most as many as cores.
    Each node has as many replicas as its share of the cores, if these are whole numbers."""
    bounds = [len(cores) * index // count for index in range(count + 1)]
    parts = (cores[start:stop] for start, stop in pairwise(bounds))
    return [tuple(core.number for core in part) for part in parts]


def parse_list(text: str) -> list[int]:
    """The numbers in a list of the kernel, such as `0-3,8`."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _first_thread(number: int) -> int:
    """The first hardware thread of the same physical core."""
    path = TOPOLOGY / f"cpu{number}" / "topology" / "thread_siblings_list"
    return min(parse_list(path.read_text())) if path.is_file() else number
