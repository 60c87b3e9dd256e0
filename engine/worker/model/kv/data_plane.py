"""The data plane: what workers of one model send to each other, through torch.distributed.

Hidden states go point to point from each rank of a stage to the same rank of the next stage, after
a header. Within a stage there are all-reduces, and logits are gathered on rank 0. Headers and
tokens are sent by Gloo, tensors by the device's `TensorTransport`. If a peer is gone, an exchange
with it raises `WorkerLost`; if a peer hangs, the executor's watchdog ends the workers that wait for
it.
"""

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from engine.errors import StartupError, WorkerLost
from engine.step import StepId
from engine.worker.ports import AllReduce
from engine.worker_settings import Placement

JOIN_TIMEOUT = timedelta(minutes=30)  # workers may load their weights at different speeds
WAIT_TIMEOUT = timedelta(hours=24)  # the executor's watchdog ends a wait much earlier
HEADER = struct.Struct("<qd")  # step, seconds
HEADER_BYTES = 512
HEADER_TAG, HIDDEN_TAG, LOGITS_TAG, TOKENS_TAG = range(4)
MAX_TOKEN_MESSAGES = 64  # sent and not received yet; more have to wait
ERROR_LEN = 200


class Group(Protocol):
    """The methods of torch's process groups that are used here, which torch's stubs lack."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...


class ReceivedHidden(NamedTuple):
    """What a stage receives for one step from the previous stage.

    `hidden` may be read after `synchronize` was called. A non-empty `fault` says why the step
    failed in an earlier stage; then `hidden` is meaningless. `seconds` is the compute time of all
    earlier stages. `at` is CLOCK_MONOTONIC on arrival.
    """

    hidden: Tensor  # [tokens, hidden]
    seconds: float
    fault: str
    at: float
    synchronize: Callable[[], None]


def _no_wait() -> None:
    """The `synchronize` of tensors that have arrived already."""


class TensorTransport(Protocol):
    """How tensors of a step are sent from worker to worker."""

    @property
    def has_own_groups(self) -> bool:
        """Whether `group` makes process groups; otherwise Gloo's are used, as for headers."""

    def group(self, store: Store, rank: int, size: int) -> Group:
        """A process group of `size` workers, which find each other in `store`."""

    def all_reduce(self, placement: Placement, plain: AllReduce) -> AllReduce:
        """How the ranks of a stage, which call this together, sum tensors: as `plain` does, over
        their group, or faster. Raises `StartupError`."""

    def computed(self) -> Callable[[], None] | None:
        """What waits, in any thread, for the work submitted so far; None if it is done."""

    def receive(
        self, group: Group, header: Work, sizes: tuple[int, int], peer: int
    ) -> tuple[Tensor, Callable[[], None]]:
        """Hidden states of these sizes, and what to call before computing with them.

        They follow the header, which has arrived when this returns.
        """


@dataclass(frozen=True, slots=True)
class HostTransport:
    """Tensors in host memory, sent by Gloo; they have arrived when `receive` returns."""

    dtype: torch.dtype = torch.float32

    @property
    def has_own_groups(self) -> bool:
        return False

    def group(self, store: Store, rank: int, size: int) -> Group:
        raise AssertionError("tensors in host memory use the Gloo groups of the data plane")

    def all_reduce(self, placement: Placement, plain: AllReduce) -> AllReduce:
        return plain

    def computed(self) -> Callable[[], None] | None:
        return None

    def receive(
        self, group: Group, header: Work, sizes: tuple[int, int], peer: int
    ) -> tuple[Tensor, Callable[[], None]]:
        hidden = torch.empty(sizes, dtype=self.dtype)
        work = group.recv([hidden], peer, HIDDEN_TAG)
        header.wait()
        work.wait()
        return hidden, _no_wait


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message being sent; its tensors must live until it has left."""

    works: tuple["Work | _Later", ...]
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True, slots=True)
class _Later:
    """What another thread sends."""

    sent: Future[None]

    def wait(self) -> None:
        self.sent.result()


class DataPlane:
    """One worker's end of the data plane. Sends and all-reduces are called in the compute thread,
    `receive` in one other thread."""

    def __init__(self, placement: Placement, store: Store, transport: TensorTransport) -> None:
        self._placement = placement
        self._store = store
        self._transport = transport
        self._sent: _Sent | None = None
        self._tokens_sent: deque[_Sent] = deque()
        self._headers = ThreadPoolExecutor(1, "podway-headers")  # starts with the first header
        with _lost_on_error("joining the other workers"):
            self._hosts = self._gloo("world", placement.index, placement.num_workers)
            self._world = self._ranks = self._hosts
            if transport.has_own_groups:
                self._world = self._group("tensors", placement.index, placement.num_workers)
                self._ranks = self._world
            if 1 < placement.num_ranks < placement.num_workers:
                name = f"stage {placement.stage}"
                self._ranks = self._group(name, placement.rank, placement.num_ranks)

    @classmethod
    def join(cls, placement: Placement, transport: TensorTransport) -> "DataPlane":
        """Connect to the other workers at the rendezvous; returns when all have connected."""
        host, _, port = placement.rendezvous.rpartition(":")
        listener = None if placement.listener is None else os.dup(placement.listener)
        try:
            store = TCPStore(
                host,
                int(port),
                placement.num_workers,
                is_master=placement.index == 0,
                timeout=JOIN_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener,
            )
            return cls(placement, store, transport)
        except (RuntimeError, WorkerLost) as error:
            raise StartupError(
                f"cannot connect to the other workers at {placement.rendezvous}: {_short(error)}"
            ) from error

    def minimum(self, what: str, value: int) -> int:
        """The smallest of all workers' values of `what`."""
        with _lost_on_error(f"agreeing on {what}"):
            self._store.set(f"{what} {self._placement.index}", str(value))
            return min(
                int(self._store.get(f"{what} {index}"))
                for index in range(self._placement.num_workers)
            )

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum the tensors of all ranks of this stage in place, to the same bits on each rank."""
        with _lost_on_error("summing over ranks"):
            self._ranks.allreduce([tensor]).wait()

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The ranks' parts `[rows, widths[rank]]` concatenated, on rank 0; None on other ranks."""
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
        """Send a step to the next stage; waits only until the previous step has left.

        If a device still computes the hidden states, the header is sent when they are done, with
        the seconds until then: a receiver that has a header starts a kernel for what follows it.
        """
        peer = self._placement.index + self._placement.num_ranks
        with _lost_on_error("sending hidden states"):
            if self._sent is not None:
                self._sent.wait()
            computed = self._transport.computed()
            header = _pack(step_id, seconds, fault)
            leaving: Work | _Later
            if computed is None:
                leaving = self._hosts.send([header], peer, HEADER_TAG)
            else:
                leaving = _Later(
                    self._headers.submit(
                        self._send_header, computed, (step_id, seconds, fault), peer
                    )
                )
            works = leaving, self._world.send([hidden], peer, HIDDEN_TAG)
            self._sent = _Sent(works, (header, hidden))

    def _send_header(
        self, computed: Callable[[], None], header: tuple[StepId, float, str], peer: int
    ) -> None:
        """Wait for the device, then send a header."""
        began = time.monotonic()
        computed()
        step_id, seconds, fault = header
        packed = _pack(step_id, seconds + time.monotonic() - began, fault)
        self._hosts.send([packed], peer, HEADER_TAG).wait()

    def receive(self, step_id: StepId, num_tokens: int, width: int) -> ReceivedHidden:
        """Wait for the `[num_tokens, width]` that the previous stage sends for this step, the next
        in order."""
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        peer = self._placement.index - self._placement.num_ranks
        with _lost_on_error("waiting for hidden states"):
            work = self._hosts.recv([header], peer, HEADER_TAG)
            sizes = (num_tokens, width)
            hidden, synchronize = self._transport.receive(self._world, work, sizes, peer)
        at = time.monotonic()
        packed = header.numpy().tobytes()
        sent_id, seconds = HEADER.unpack_from(packed)
        if sent_id != step_id:
            raise WorkerLost(f"hidden states of step {sent_id} came where {step_id} was next")
        fault = packed[HEADER.size :].rstrip(b"\0").decode("utf-8", "replace")
        return ReceivedHidden(hidden, seconds, fault, at, synchronize)

    def send_tokens(self, step_id: StepId, tokens: Sequence[int], peers: Sequence[int]) -> None:
        """Send a step's tokens to the workers `peers`; does not wait for them."""
        message = torch.tensor([step_id, *tokens])
        with _lost_on_error("sending tokens back"):
            works = [self._hosts.send([message], peer, TOKENS_TAG) for peer in peers]
            self._tokens_sent.append(_Sent(tuple(works), (message,)))
            if len(self._tokens_sent) > MAX_TOKEN_MESSAGES:
                self._tokens_sent.popleft().wait()

    def receive_tokens(self, step_id: StepId, count: int, peer: int) -> list[int]:
        """Wait for the tokens of a step, the next in order from that worker."""
        message = torch.empty(1 + count, dtype=torch.int64)
        with _lost_on_error("waiting for tokens"):
            self._hosts.recv([message], peer, TOKENS_TAG).wait()
        sent_id, *tokens = message.tolist()
        if sent_id != step_id:
            raise WorkerLost(f"tokens of step {sent_id} came where {step_id} was next")
        return tokens

    def _group(self, name: str, rank: int, size: int) -> Group:
        """A process group for tensors."""
        if self._transport.has_own_groups:
            return self._transport.group(PrefixStore(name, self._store), rank, size)
        return self._gloo(name, rank, size)

    def _gloo(self, name: str, rank: int, size: int) -> Group:
        """A Gloo process group, for host memory."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # the stubs lack it
        options._devices = [ProcessGroupGloo.create_device(hostname=self._placement.address)]
        options._timeout = WAIT_TIMEOUT
        options._threads = 1
        return cast(Group, ProcessGroupGloo(PrefixStore(name, self._store), rank, size, options))


@contextmanager
def _lost_on_error(doing: str) -> Iterator[None]:
    """Turn errors of torch.distributed into `WorkerLost`."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost(f"the data plane failed while {doing}: {_short(error)}") from error


def _pack(step_id: StepId, seconds: float, fault: str) -> Tensor:
    packed = bytearray(HEADER_BYTES)
    HEADER.pack_into(packed, 0, step_id, seconds)
    line = fault.encode()[: HEADER_BYTES - HEADER.size]
    packed[HEADER.size : HEADER.size + len(line)] = line
    return torch.frombuffer(packed, dtype=torch.uint8)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:ERROR_LEN]
