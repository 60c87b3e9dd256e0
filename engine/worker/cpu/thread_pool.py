"""A team of threads that shares out the chunks of one kernel after another.

Theory of operation. The leader (who calls `run`) posts a job: a kernel's address, its operands
and a number of chunks. Leader and helpers claim chunks by compare-and-swap on one word that also
carries the job's number, so a helper that comes late can claim nothing of a job that is over.
The leader waits for *chunks done*, never for *threads arrived*: a helper that the system does
not schedule costs nothing. While a step runs (`awake`) helpers look for jobs without sleeping
for long; between steps they wait on a semaphore.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numba import njit, types
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.cpu.build import compiled
from engine.worker.cpu.intrinsics import (
    add_release,
    call_kernel,
    compare_and_swap,
    load_acquire,
    store_release,
    words,
)
from engine.worker.cpu.kernel_graph import CALL_WORDS, KernelGraph, OperandMemory

# Words of the control block, as byte offsets; each on its own cache line.
CLAIM, DONE, KERNEL, OPERANDS, SPINS, IS_AWAKE = 0, 64, 128, 136, 144, 192
CONTROL_WORDS = 32

COUNT_BITS = 24
COUNT_MASK = (1 << COUNT_BITS) - 1
PAUSE_MICROSECONDS = 20
# How often a thread that waits looks at memory before it sleeps for moments: for about a tenth of
# a millisecond, or hardly, where others want the core.
SPINS_BEFORE_SLEEP = {"spin": 20000, "sleep": 200}

_sleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@njit(inline="always")
def _work(control, thread):
    """Claim and run chunks until none is left; how many were run."""
    ran = 0
    while True:
        claim = load_acquire(control + CLAIM)
        total = (claim >> COUNT_BITS) & COUNT_MASK
        chunk = claim & COUNT_MASK
        if chunk >= total:
            return ran
        if compare_and_swap(control + CLAIM, claim, claim + 1):
            job = words(control + KERNEL, 2)
            call_kernel(job[0], job[1], chunk, thread)
            add_release(control + DONE, 1)
            ran += 1


@njit(inline="always")
def _lead(control, kernel, operands, chunks):
    job = words(control + KERNEL, 3)
    job[0], job[1] = kernel, operands
    number = (load_acquire(control + CLAIM) >> (2 * COUNT_BITS)) + 1
    store_release(control + DONE, 0)
    claim = ((number & 0x7FFF) << (2 * COUNT_BITS)) | (chunks << COUNT_BITS)
    store_release(control + CLAIM, claim)
    _work(control, 0)
    spins = 0
    while load_acquire(control + DONE) < chunks:
        spins += 1
        if spins > job[2]:
            _sleep(PAUSE_MICROSECONDS)


def lead(control, kernel, operands, chunks):
    """Run all chunks of a kernel together with whoever helps."""
    _lead(control, kernel, operands, chunks)


def play(control, calls, count):
    """Lead one call of a tape's table after another."""
    for call in range(count):
        row = words(calls + call * (CALL_WORDS * 8), CALL_WORDS)
        _lead(control, row[0], row[1], row[2])


def follow(control, thread):
    """Help with every job until the step is over."""
    spins, most = 0, words(control + SPINS, 1)[0]
    while load_acquire(control + IS_AWAKE) != 0:
        if _work(control, thread) > 0:
            spins = 0
        else:
            spins += 1
        if spins > most:
            _sleep(PAUSE_MICROSECONDS)


class NativeThreadPool:
    """`threads` workers: the caller and `threads - 1` helpers, which end with the process."""

    def __init__(self, threads: int, wait: str = "spin") -> None:
        """`wait` is what a thread does that finds no work: a key of `SPINS_BEFORE_SLEEP`."""
        assert threads >= 1, "a team has at least its leader"
        self.threads = threads
        self.tape: KernelGraph | None = None  # while it is recorded
        self._memory = OperandMemory()
        self._lead = compiled(lead, types.void(*[types.int64] * 4))
        self._play = compiled(play, types.void(*[types.int64] * 3))
        self._follow = compiled(follow, types.void(types.int64, types.int64))
        self._block: NDArray[np.int64] = np.zeros(CONTROL_WORDS, dtype=np.int64)
        self._block[SPINS // 8] = SPINS_BEFORE_SLEEP[wait]
        self._control = int(self._block.ctypes.data)
        self._begun = [threading.Semaphore(0) for _ in range(threads - 1)]
        for number in range(1, threads):
            helper = threading.Thread(
                target=self._help, args=(number,), name=f"podway-compute-{number}", daemon=True
            )
            helper.start()

    def __repr__(self) -> str:
        return f"<Team of {self.threads}>"

    def run(self, kernel: int, operands: int, chunks: int) -> None:
        """Run chunks 0 .. chunks - 1; both arguments are addresses that outlive the call."""
        self._lead(self._control, kernel, operands, chunks)

    def room(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for the result of a kernel: new, but that of the tape while one is recorded.

        A tape's is used again by the next result of the same `kind`.
        """
        return (
            torch.empty(shape, dtype=dtype)
            if self.tape is None
            else self.tape.take(kind, shape, dtype)
        )

    @contextmanager
    def recording(self) -> Iterator[KernelGraph]:
        """The kernels that are called inside the block run, and are on the tape after it."""
        assert self.tape is None, "one tape is recorded at a time"
        self.tape = KernelGraph(self._memory)
        try:
            yield self.tape
        finally:
            self.tape = None

    def play(self, tape: KernelGraph) -> None:
        """Run the calls of a tape, one after the other."""
        table = tape.table()
        self._play(self._control, int(table.ctypes.data), len(table))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Helpers are at hand inside the block; outside, `run` works but works alone."""
        self._block[IS_AWAKE // 8] = 1
        for semaphore in self._begun:
            semaphore.release()
        try:
            yield
        finally:
            self._block[IS_AWAKE // 8] = 0

    def _help(self, number: int) -> None:
        while True:
            self._begun[number - 1].acquire()
            self._follow(self._control, number)
