"""A pool of threads that shares out the chunks of one kernel after another.

Theory of operation. The leader (the thread that calls `run`) posts a job: a kernel's address, its
operands and a number of chunks. Leader and helpers claim chunks by compare-and-swap on one word
that also carries the job's number, so a helper that comes late can claim nothing of a job that is
over. The leader waits for *chunks done*, never for *threads arrived*: a helper that the system does
not schedule costs nothing. While a step runs (`awake`) helpers poll for jobs without sleeping for
long; between steps they wait for a semaphore of the system. They never return to Python, so they
need no GIL, which the leader holds while it prepares a step.

A graph names the weights that its next linear reads. A helper without a chunk prefetches them, so
that memory is read also while the leader computes a norm or the last chunk of a linear alone. After
a graph's last linear these are the first weights of the next step: if that step is already known,
helpers are kept awake between the two, and prefetch while the leader runs Python.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numba import njit, types
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.cpu.build import compiled, request
from engine.worker.cpu.freed_outputs import FreedOutputs
from engine.worker.cpu.intrinsics import (
    add_release,
    call_kernel,
    compare_and_swap,
    int64s,
    load_acquire,
    store_release,
)
from engine.worker.cpu.kernel_graph import Call, KernelGraph, KernelOutputs, read_call
from engine.worker.cpu.kernels.vectors import PREFETCHED_AT_ONCE, prefetch_lines

# Fields of the control block, as byte offsets; those that threads contend for are on cache lines of
# their own.
CLAIM, DONE, KERNEL, OPERANDS, IS_AWAKE = 0, 64, 128, 136, 192
AHEAD, AHEAD_END = 256, 264  # what helpers prefetch
WAKE = 320  # a semaphore with one count for each helper that a step wakes
CONTROL_BYTES = 384
CALL_BYTES = ctypes.sizeof(Call)

COUNT_BITS = 24
COUNT_MASK = (1 << COUNT_BITS) - 1
PAUSE_MICROSECONDS = 20
# How often a waiting thread reads memory before it sleeps: for about a tenth of a millisecond
MAX_SPINS = 20000

_sleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
_libc = ctypes.PyDLL(None)  # with the GIL, which its short calls need not give back
_libc.sem_init.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_libc.sem_post.argtypes = (ctypes.c_void_p,)


@njit(inline="always")
def _work(control, thread):
    """Claim and run chunks until none is left; returns how many were run."""
    ran = 0
    while True:
        claim = load_acquire(control + CLAIM)
        total = (claim >> COUNT_BITS) & COUNT_MASK
        chunk = claim & COUNT_MASK
        if chunk >= total:
            return ran
        if compare_and_swap(control + CLAIM, claim, claim + 1):
            kernel, operands = int64s(control + KERNEL, 1)[0], int64s(control + OPERANDS, 1)[0]
            call_kernel(kernel, operands, chunk, thread)
            add_release(control + DONE, 1)
            ran += 1


@njit(inline="always")
def _lead(control, kernel, operands, chunks):
    """Run a kernel; one chunk runs here, without a job for the helpers."""
    if chunks == 1:
        call_kernel(kernel, operands, 0, 0)
        return
    int64s(control + KERNEL, 1)[0] = kernel
    int64s(control + OPERANDS, 1)[0] = operands
    number = (load_acquire(control + CLAIM) >> (2 * COUNT_BITS)) + 1
    store_release(control + DONE, 0)
    claim = ((number & 0x7FFF) << (2 * COUNT_BITS)) | (chunks << COUNT_BITS)
    store_release(control + CLAIM, claim)
    _work(control, 0)
    spins = 0
    while load_acquire(control + DONE) < chunks:
        spins += 1
        if spins > MAX_SPINS:
            _sleep(PAUSE_MICROSECONDS)


def lead(control, kernel, operands, chunks):
    """Run all chunks of a kernel, together with the helpers."""
    _lead(control, kernel, operands, chunks)


def replay(control, calls, count):
    """Lead the calls of a graph's table, one after another."""
    ahead = 0
    for number in range(count):
        call = read_call(calls + number * CALL_BYTES)
        if call.ahead != ahead:
            ahead = call.ahead
            store_release(control + AHEAD_END, call.ahead_end)
            store_release(control + AHEAD, ahead)
        _lead(control, call.kernel, call.operands, call.chunks)


def follow(control, thread):
    """Help with each step that wakes this thread; never returns. A wake-up that came too late, or
    from a signal, finds no step."""
    while True:
        _wait(control + WAKE)
        _follow_step(control, thread)


@njit(inline="always")
def _follow_step(control, thread):
    """Help with every job until the step is over; between jobs, prefetch the next weights."""
    spins = ahead = at = 0
    while load_acquire(control + IS_AWAKE) != 0:
        if _work(control, thread) > 0:
            spins = 0
        else:
            spins += 1
        if load_acquire(control + AHEAD) != ahead:
            ahead = at = load_acquire(control + AHEAD)
        if at < load_acquire(control + AHEAD_END):
            prefetch_lines(at)
            at += PREFETCHED_AT_ONCE
        elif spins > MAX_SPINS:
            _sleep(PAUSE_MICROSECONDS)


class NativeThreadPool:
    """`threads` workers: the caller and `threads - 1` helpers, which end with the process."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1, "a pool has at least its leader"
        self.threads = threads
        self.graph: KernelGraph | None = None  # while one is recorded
        self._memory, self._freed = KernelOutputs(), FreedOutputs()
        request((lead, replay, follow))
        self._lead = compiled(lead, types.void(*[types.int64] * 4))
        self._replay = compiled(replay, types.void(*[types.int64] * 3))
        self._follow = compiled(follow, types.void(types.int64, types.int64))
        self._block: NDArray[np.int64] = np.zeros(CONTROL_BYTES // 8, dtype=np.int64)
        self._control = int(self._block.ctypes.data)
        self._first_weights = (0, 0)  # addresses of what steps read first
        _libc.sem_init(self._control + WAKE, 0, 0)
        for number in range(1, threads):
            helper = threading.Thread(
                target=self._help, args=(number,), name=f"podway-compute-{number}", daemon=True
            )
            helper.start()

    def __repr__(self) -> str:
        return f"<NativeThreadPool of {self.threads}>"

    def run(self, kernel: int, operands: int, chunks: int) -> None:
        """Run chunks 0 to chunks - 1; both arguments are addresses that outlive the call."""
        self._lead(self._control, kernel, operands, chunks)

    def empty(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Uninitialized memory for the output of a kernel.

        While a graph is recorded it is the graph's, and the next output of the same `kind` uses it
        again; otherwise it is a new tensor.
        """
        if self.graph is None:
            return self._freed.take(shape, dtype)
        return self.graph.take(kind, shape, dtype)

    @contextmanager
    def recording(self, rows: int = 0) -> Iterator[KernelGraph]:
        """Kernels called inside the block do not run, and are in the graph, which can be resized if
        all are over `rows`."""
        assert self.graph is None, "one graph is recorded at a time"
        self.graph = KernelGraph(self._memory, rows)
        try:
            yield self.graph
        finally:
            self.graph = None

    def replay(self, graph: KernelGraph) -> None:
        """Run the calls of a graph, one after the other."""
        table = graph.table()
        self._first_weights = graph.first_weights
        self._replay(self._control, int(table.ctypes.data), len(table))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Helpers work inside the block; unless they worked before, `run` computes without them
        outside of it."""
        was_awake = self.is_awake
        self.wake()
        try:
            yield
        finally:
            if not was_awake:
                self.rest()

    @property
    def is_awake(self) -> bool:
        """Whether helpers work, or wait for work without sleeping for long."""
        return bool(self._block[IS_AWAKE // 8])

    def wake(self) -> None:
        """Let helpers work until `rest`; before the first kernel they prefetch its weights."""
        if self.is_awake:
            return
        self._block[AHEAD // 8], self._block[AHEAD_END // 8] = self._first_weights
        self._block[IS_AWAKE // 8] = 1
        for _ in range(1, self.threads):
            _libc.sem_post(self._control + WAKE)

    def rest(self) -> None:
        """Let helpers sleep until `wake`."""
        self._block[IS_AWAKE // 8] = 0

    def _help(self, number: int) -> None:
        self._follow(self._control, number)
