"""The side of the process: it forks a child for each job, which is limited and killed.

A job that exceeds its limits ends its own child only. The process has one thread, so forking is
safe. It ends, with its children, when the socket of the server is closed.
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import NamedTuple

RECEIVE_BYTES = 1 << 16
NICENESS = 5  # children yield to the process that sends tokens
OUT_OF_MEMORY = 3  # exit status


class Limits(NamedTuple):
    """What one job may use; the memory is in addition to that of the process.

    For the first `idle_seconds` a child runs only on cores that would be idle. If it has not ended
    by then, it is killed, and another one begins anew beside all other processes.
    """

    seconds: float
    num_bytes: int
    idle_seconds: float = 0.0


class Outcome(NamedTuple):
    """How the child of a job has ended. `output` is whole if neither flag is set and `status`,
    that of `os.waitpid`, is 0."""

    number: int
    output: bytes
    status: int
    is_late: bool

    @property
    def is_out_of_memory(self) -> bool:
        return os.WIFEXITED(self.status) and os.WEXITSTATUS(self.status) == OUT_OF_MEMORY

    @property
    def is_killed(self) -> bool:
        """Whether it was killed from outside."""
        is_killed = os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL
        return is_killed and not self.is_late


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    work: Callable[[], bytes]
    seconds: float
    files: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Child:
    job: _Job
    pid: int
    pipe: int  # the end from which its output is read
    deadline: float
    is_idle: bool  # runs on idle cores only
    received: bytearray = field(default_factory=bytearray)


class Children:
    """The children of this process, each with one job."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._running: dict[int, _Child] = {}  # by pipe
        self._selector = selectors.DefaultSelector()

    def serve(
        self,
        connection: socket.socket,
        receive: Callable[[], bool],
        answer: Callable[[Outcome], None],
    ) -> None:
        """Call `receive` when the connection has data, until it returns False, and `answer` when a
        child has ended."""
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(self._seconds_left()):
                    if key.fileobj is connection:
                        if not receive():
                            return
                    elif outcome := self._read(self._running[key.fd]):
                        answer(outcome)
                for child in [c for c in self._running.values() if c.deadline <= _now()]:
                    os.kill(child.pid, signal.SIGKILL)
                    outcome = self._ended(child, is_late=True)
                    if child.is_idle:
                        self._start(child.job, is_idle=False)
                    else:
                        answer(_finished(child.job, outcome))
        finally:
            for child in self._running.values():
                os.kill(child.pid, signal.SIGKILL)

    def fork(
        self,
        number: int,
        work: Callable[[], bytes],
        seconds: float | None = None,
        files: Sequence[int] = (),
    ) -> None:
        """Run `work`, whose result is the output, in a child that may take `seconds` instead of
        those of the limits. The `files` are its own then; `work` may run twice."""
        job = _Job(number, work, self.limits.seconds if seconds is None else seconds, files)
        self._start(job, is_idle=self.limits.idle_seconds > 0.0)

    def _start(self, job: _Job, *, is_idle: bool) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            _run_child(job.work, write_end, self.limits, is_idle=is_idle)
        os.close(write_end)
        seconds = min(job.seconds, self.limits.idle_seconds) if is_idle else job.seconds
        self._running[read_end] = _Child(job, pid, read_end, _now() + seconds, is_idle)
        self._selector.register(read_end, selectors.EVENT_READ)

    def _read(self, child: _Child) -> Outcome | None:
        """Read more of a child's output; at its end the child has ended."""
        if piece := os.read(child.pipe, RECEIVE_BYTES):
            child.received.extend(piece)
            return None
        return _finished(child.job, self._ended(child, is_late=False))

    def _ended(self, child: _Child, *, is_late: bool) -> Outcome:
        _, status = os.waitpid(child.pid, 0)
        del self._running[child.pipe]
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        return Outcome(child.job.number, bytes(child.received), status, is_late)

    def _seconds_left(self) -> float | None:
        """Until the next deadline; None if no child runs."""
        deadlines = [child.deadline for child in self._running.values()]
        return max(0.0, min(deadlines) - _now()) if deadlines else None


def _finished(job: _Job, outcome: Outcome) -> Outcome:
    """The outcome of a job, whose files are closed."""
    for file in job.files:
        os.close(file)
    return outcome


def _run_child(work: Callable[[], bytes], pipe: int, limits: Limits, *, is_idle: bool) -> None:
    """Write the output and exit; a child that exceeds its limits exits without one."""
    status = 1
    with contextlib.suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # native code prints aborts
        if is_idle:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(limits.seconds) + 1,) * 2)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + limits.num_bytes,) * 2)
        try:
            output = work()
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        with open(pipe, "wb") as file:
            file.write(output)
        status = 0
    os._exit(status)


def _address_space() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _now() -> float:
    return time.monotonic()


def connect(descriptor: str) -> socket.socket:
    """The connection to the server, which gets the signals of a terminal alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return socket.socket(fileno=int(descriptor))
