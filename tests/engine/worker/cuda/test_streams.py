"""The pools of memory that CUDA graphs are captured with; torch's graphs are replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from engine.worker.cuda.streams import CudaEvent, CudaStream, CudaStreams


class NoGraph:
    def replay(self) -> None:
        """Nothing was captured."""


def test_graphs_that_time_kernels_do_not_share_the_pool_of_graphs_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch refuses a pool whose last graph was freed; a graph that times a kernel soon is."""
    pools: list[object] = []
    numbers = count()

    @contextmanager
    def capturing(graph: NoGraph, *, pool: object, **_: object) -> Iterator[None]:
        pools.append(pool)
        yield

    class Event:
        def record(self, stream: object) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, other: object) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(
        CudaStream,
        "record",
        lambda self, *, is_timed=False: CudaEvent(Event()),  # type: ignore[arg-type]
    )
    streams = CudaStreams(torch.device("cpu"))
    assert streams.seconds(lambda: None) == pytest.approx(2e-3)
    streams.capture(lambda: None)
    streams.seconds(lambda: None)
    streams.capture(lambda: None)
    first, kept, second, also_kept = pools
    assert kept == also_kept
    assert len({first, kept, second}) == 3
