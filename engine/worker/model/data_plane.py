"""The data plane: what workers of one model tell each other, through torch.distributed.

Hidden states go point to point from each rank of a stage to the same rank of the next, with a
header before them. Within a stage there are sums, and the gathering of logits on rank 0. Headers
and tokens go by Gloo; what is computed with goes by what its device's `Carrier` says. A peer that
is gone makes every exchange with it `WorkerLost`, never a wait without end: the executor's
watchdog ends whoever waits for a peer that hangs.
"""

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from engine.errors import StartupError, WorkerLost
from engine.step import Placement, StepId

JOINING = timedelta(minutes=30)  # the slowest worker may take so much longer to read its weights
WAITING = timedelta(hours=24)  # the watchdog that counts is the executor's
HEADER = struct.Struct("<qd")  # step, seconds
HEADER_BYTES = 512
HEADER_TAG, HIDDEN_TAG, LOGITS_TAG, TOKENS_TAG = range(4)
MOST_TOKENS_SENT = 64  # messages that nobody has taken yet; beyond that, wait
ERROR_LEN = 200


class Group(Protocol):
    """What we use of torch's process groups, whose stubs do not say it."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...


class Handed(NamedTuple):
    """What a stage gets for one step from the stage before.

    `hidden` may be read by what is computed after `settle` was called; with a `fault`, the line
    that says why the step failed there, it holds nothing. `seconds` were computed on this step by
    all stages before. `at` is CLOCK_MONOTONIC on arrival.
    """

    hidden: Tensor  # [tokens, hidden]
    seconds: float
    fault: str
    at: float
    settle: Callable[[], None]


def _is_there() -> None:
    """Nothing has to be waited for."""


class Carrier(Protocol):
    """How tensors of a step go from worker to worker."""

    @property
    def has_own_groups(self) -> bool:
        """Whether `group` makes them; else they go by Gloo, as headers do."""
        ...

    def group(self, store: Store, rank: int, size: int) -> Group:
        """Over part of the workers, who meet in `store`."""
        ...

    def receive(
        self, group: Group, header: Work, sizes: tuple[int, int], peer: int
    ) -> tuple[Tensor, Callable[[], None]]:
        """Hidden states of these sizes, and what to call before they are computed with.

        They come after the header, which has arrived when this returns.
        """
        ...


@dataclass(frozen=True, slots=True)
class HostCarrier:
    """By Gloo from host to host; a tensor is there when `receive` returns."""

    dtype: torch.dtype = torch.float32

    @property
    def has_own_groups(self) -> bool:
        return False

    def group(self, store: Store, rank: int, size: int) -> Group:
        raise AssertionError("tensors of the host go by the groups of the plane")

    def receive(
        self, group: Group, header: Work, sizes: tuple[int, int], peer: int
    ) -> tuple[Tensor, Callable[[], None]]:
        hidden = torch.empty(sizes, dtype=self.dtype)
        work = group.recv([hidden], peer, HIDDEN_TAG)
        header.wait()
        work.wait()
        return hidden, _is_there


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message on its way; its tensors must live until it has left."""

    works: tuple[Work, ...]
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class DataPlane:
    """One worker's end of the data plane. Sends and sums belong to the thread that computes,
    `receive` to one other."""

    def __init__(self, placement: Placement, store: Store, carrier: Carrier) -> None:
        self._placement = placement
        self._store = store
        self._carrier = carrier
        self._sent: _Sent | None = None
        self._tokens_sent: deque[_Sent] = deque()
        with _lost_on_error("joining the other workers"):
            self._hosts = self._gloo("world", placement.index, placement.num_workers)
            self._world = self._ranks = self._hosts
            if carrier.has_own_groups:
                self._world = self._group("tensors", placement.index, placement.num_workers)
                self._ranks = self._world
            if 1 < placement.num_ranks < placement.num_workers:
                name = f"stage {placement.stage}"
                self._ranks = self._group(name, placement.rank, placement.num_ranks)

    @classmethod
    def join(cls, placement: Placement, carrier: Carrier) -> "DataPlane":
        """Meet the others at the rendezvous; returns when all are there."""
        host, _, port = placement.rendezvous.rpartition(":")
        listener = None if placement.listener is None else os.dup(placement.listener)
        try:
            store = TCPStore(
                host,
                int(port),
                placement.num_workers,
                is_master=placement.index == 0,
                timeout=JOINING,
                wait_for_workers=False,
                master_listen_fd=listener,
            )
            return cls(placement, store, carrier)
        except (RuntimeError, WorkerLost) as error:
            raise StartupError(
                f"cannot meet the other workers at {placement.rendezvous}: {_shortly(error)}"
            ) from error

    def least(self, what: str, value: int) -> int:
        """The least of all workers' values of `what`."""
        with _lost_on_error(f"agreeing on {what}"):
            self._store.set(f"{what} {self._placement.index}", str(value))
            return min(
                int(self._store.get(f"{what} {index}"))
                for index in range(self._placement.num_workers)
            )

    def add_up(self, tensor: Tensor) -> None:
        """Add the tensors of all ranks of this stage; in place, to the same bits on each."""
        with _lost_on_error("adding up"):
            self._ranks.allreduce([tensor]).wait()

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The ranks' parts `[rows, widths[rank]]` side by side, on rank 0; None elsewhere."""
        rank, rows = self._placement.rank, len(part)
        with _lost_on_error("gathering logits"):
            if rank > 0:
                self._ranks.send([part.contiguous()], 0, LOGITS_TAG).wait()
                return None
            parts = [part, *(part.new_empty(rows, width) for width in widths[1:])]
            for source in range(1, len(parts)):
                self._ranks.recv([parts[source]], source, LOGITS_TAG).wait()
            return torch.cat(parts, dim=1)

    def send(self, step_id: StepId, hidden: Tensor, seconds: float, fault: str = "") -> None:
        """Hand a step on to the next stage; waits only until the one before has left."""
        header = _pack(step_id, seconds, fault)
        peer = self._placement.index + self._placement.num_ranks
        with _lost_on_error("handing hidden states on"):
            if self._sent is not None:
                self._sent.wait()
            self._sent = _Sent(
                (
                    self._hosts.send([header], peer, HEADER_TAG),
                    self._world.send([hidden], peer, HIDDEN_TAG),
                ),
                (header, hidden),
            )

    def receive(self, step_id: StepId, num_tokens: int, hidden_size: int) -> Handed:
        """Wait for what the stage before hands on for this step, the next in order."""
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        peer = self._placement.index - self._placement.num_ranks
        with _lost_on_error("waiting for hidden states"):
            work = self._hosts.recv([header], peer, HEADER_TAG)
            sizes = (num_tokens, hidden_size)
            hidden, settle = self._carrier.receive(self._world, work, sizes, peer)
        at = time.monotonic()
        packed = header.numpy().tobytes()
        sent_id, seconds = HEADER.unpack_from(packed)
        if sent_id != step_id:
            raise WorkerLost(f"hidden states of step {sent_id} came where {step_id} was next")
        fault = packed[HEADER.size :].rstrip(b"\0").decode("utf-8", "replace")
        return Handed(hidden, seconds, fault, at, settle)

    def send_tokens(self, step_id: StepId, tokens: Sequence[int], peers: Sequence[int]) -> None:
        """Tell the workers `peers` what a step drew; does not wait for them."""
        message = torch.tensor([step_id, *tokens])
        with _lost_on_error("sending tokens back"):
            works = [self._hosts.send([message], peer, TOKENS_TAG) for peer in peers]
            self._tokens_sent.append(_Sent(tuple(works), (message,)))
            if len(self._tokens_sent) > MOST_TOKENS_SENT:
                self._tokens_sent.popleft().wait()

    def receive_tokens(self, step_id: StepId, count: int, peer: int) -> list[int]:
        """Wait for what a step drew, the next in order from that worker."""
        message = torch.empty(1 + count, dtype=torch.int64)
        with _lost_on_error("waiting for tokens"):
            self._hosts.recv([message], peer, TOKENS_TAG).wait()
        sent_id, *tokens = message.tolist()
        if sent_id != step_id:
            raise WorkerLost(f"tokens of step {sent_id} came where {step_id} was next")
        return tokens

    def _group(self, name: str, rank: int, size: int) -> Group:
        """For tensors, over part of the workers."""
        if self._carrier.has_own_groups:
            return self._carrier.group(PrefixStore(name, self._store), rank, size)
        return self._gloo(name, rank, size)

    def _gloo(self, name: str, rank: int, size: int) -> Group:
        """For what lies on the host, over part of the workers."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # the stubs lack it
        options._devices = [ProcessGroupGloo.create_device(hostname=self._placement.address)]
        options._timeout = WAITING
        options._threads = 1
        return cast(Group, ProcessGroupGloo(PrefixStore(name, self._store), rank, size, options))


@contextmanager
def _lost_on_error(doing: str) -> Iterator[None]:
    """What torch.distributed raises, as the loss of this worker."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost(f"the data plane broke while {doing}: {_shortly(error)}") from error


def _pack(step_id: StepId, seconds: float, fault: str) -> Tensor:
    packed = bytearray(HEADER_BYTES)
    HEADER.pack_into(packed, 0, step_id, seconds)
    line = fault.encode()[: HEADER_BYTES - HEADER.size]
    packed[HEADER.size : HEADER.size + len(line)] = line
    return torch.frombuffer(packed, dtype=torch.uint8)


def _shortly(error: Exception) -> str:
    return " ".join(str(error).split())[:ERROR_LEN]
