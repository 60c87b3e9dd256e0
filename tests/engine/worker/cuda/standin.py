"""Streams without a GPU, as late as a GPU may be: work on a side stream is done only when something
waits for it, and what is written too early, or read too early, is wrong.

Compute is done at once, on tensors of the CPU. Pinned memory that was copied from must not change
before an event after the copy was waited for by the host. A graph runs its work again on the same
tensors, into the tensors that the capture returned.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import WorkerLost
from engine.worker.streams import Graph, StreamEvent

T = TypeVar("T")
SYNCHRONISES = ("_local_scalar_dense", "nonzero", "masked_select", "unique")


class _Read(NamedTuple):
    """Pinned memory that a copy reads: what it held when the copy was given."""

    source: Tensor
    content: Tensor


@dataclass(eq=False)
class StandInEvent:
    """Reached once the host has waited for it, or for a later one of its stream."""

    stream: "StandInStream"
    serial: int  # of all that was given to all streams before it
    at: float
    is_timed: bool
    upto: int  # pieces of work of its stream

    @property
    def is_reached(self) -> bool:
        return self.serial <= self.stream.reached

    def wait(self) -> None:
        self.stream.streams.host_waits(self)

    def seconds_since(self, earlier: StreamEvent) -> float:
        before = cast(StandInEvent, earlier)
        assert self.is_timed, "an event without a time"
        assert before.is_timed, "an event without a time"
        assert self.is_reached, "the time of an event that may not be reached"
        assert before.is_reached, "nor may this one"
        return self.at - before.at


@dataclass(eq=False)
class StandInStream:
    """A side stream puts its work off; the compute stream does not."""

    streams: "StandInStreams"
    is_lazy: bool
    waiting: list[Callable[[], object]] = field(default_factory=list)
    num_done: int = 0
    reached: int = 0  # the serial of the last event that the host has waited for

    def submit(self, work: Callable[[], object]) -> None:
        if self.is_lazy:
            self.waiting.append(work)
        else:
            work()

    def record(self, *, is_timed: bool = False) -> StandInEvent:
        self.streams.serial += 1
        upto = self.num_done + len(self.waiting)
        now = time.perf_counter()
        return StandInEvent(self, self.streams.serial, now, is_timed, upto)

    def wait_for(self, event: StreamEvent) -> None:
        self.submit(cast(StandInEvent, event).stream.runner(cast(StandInEvent, event).upto))

    def runner(self, upto: int) -> Callable[[], None]:
        return lambda: self.run(upto)

    def run(self, upto: int) -> None:
        """Do what was given before, as the device might have long ago."""
        while self.num_done < upto and self.waiting:
            work = self.waiting.pop(0)
            self.num_done += 1
            with torch.inference_mode():
                work()


@dataclass(eq=False)
class StandInGraph:
    """Runs its work again, and finds its results where the capture left them."""

    work: Callable[[], object]
    result: object
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        for old, new in zip(_tensors(self.result), _tensors(self.work()), strict=True):
            old.copy_(new)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, tuple), "graphs return tensors"
    return [tensor for tensor in result if isinstance(tensor, Tensor)]


class StandInStreams:
    """See `Streams`; remembers what was captured, and what the host waited for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.serial = 0
        self.compute = StandInStream(self, is_lazy=False)
        self.sides: list[StandInStream] = []
        self.graphs: list[StandInGraph] = []
        self.is_capturing = False
        self.num_host_waits = 0
        self.fault = ""  # why every call to the device fails
        self._pinned: dict[int, Tensor] = {}  # by the address of their memory, kept alive
        self._reads: list[tuple[int, _Read]] = []
        self._step_began: int | None = None  # the serial at which the step in the making began

    def side(self) -> StandInStream:
        self.sides.append(StandInStream(self, is_lazy=True))
        return self.sides[-1]

    def pinned(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory filled with NaN, so that a read before a write shows."""
        rubbish = torch.empty(tuple(sizes), dtype=dtype)
        self._pinned[rubbish.untyped_storage().data_ptr()] = rubbish
        return rubbish.fill_(float("nan") if dtype.is_floating_point else 77)

    @property
    def pinned_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._pinned.values())

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert not self.is_capturing, "a copy of the host's in a graph"
        assert target.shape == source.shape, "a copy never broadcasts"
        is_pinned = [t.untyped_storage().data_ptr() in self._pinned for t in (target, source)]
        assert any(is_pinned), "a copy that waits for the device: neither side is pinned"
        if is_pinned[1]:
            self.serial += 1
            self._reads.append((self.serial, _Read(source, source.clone())))
        target.copy_(source)

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        self.is_capturing = True
        try:
            result = work()
        finally:
            self.is_capturing = False
        self.graphs.append(StandInGraph(work, result))
        return self.graphs[-1], result

    def synchronize(self) -> None:
        if self.fault:
            raise WorkerLost(f"the GPU failed: {self.fault}")
        for side in self.sides:
            side.run(side.num_done + len(side.waiting))
        self._check_reads(self.serial)

    def host_waits(self, event: StandInEvent) -> None:
        """The host goes on when the event is reached, and so are all before it in its stream."""
        assert self._step_began is None or event.serial <= self._step_began, (
            "the host waits, in a step, for what the step itself has given"
        )
        self.num_host_waits += 1
        event.stream.run(event.upto)
        event.stream.reached = max(event.stream.reached, event.serial)
        if event.stream is self.compute:
            self._check_reads(event.serial)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Nothing inside waits for the device, but for what was given to it before."""
        self._step_began = self.serial
        with pytest.MonkeyPatch.context() as patched, _NoReading():  # type: ignore[no-untyped-call]
            for name in ("tolist", "cpu", "item"):
                patched.setattr(Tensor, name, _refuse)
            try:
                yield
            finally:
                self._step_began = None

    def _check_reads(self, upto: int) -> None:
        for serial, read in self._reads:
            if serial <= upto:
                same = torch.equal(_bytes(read.source), _bytes(read.content))
                assert same, "pinned memory was written to while a copy may have read it"
        self._reads = [(serial, read) for serial, read in self._reads if serial > upto]


def _refuse(tensor: Tensor, *_: object) -> None:
    raise AssertionError("the host reads a tensor of the device in a step")


class _NoReading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations whose result the host would have to wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        assert not name.startswith(SYNCHRONISES), f"{name} waits for the device in a step"
        return func(*args, **(kwargs or {}))
