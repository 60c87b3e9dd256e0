"""A process that compiles grammars in children, which are limited in time and memory and killed.

The process opens the compiler once. For each grammar it forks a child that compiles the grammar and
computes the first mask, so a grammar that exceeds its limits ends its own child only. The process
has one thread, so forking is safe. It ends, with its children, when its socket is closed.

    python -m adapters.grammar.compile_process FD LOADER DIRECTORY SECONDS BYTES
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import NamedTuple

import msgspec

from adapters.grammar import open_compiler
from engine.grammar import GrammarCompiler, GrammarError, TokenTable
from engine.step import Grammar
from engine.transport.wire import HEADER, FrameReader

RECEIVE_BYTES = 1 << 16
MIB = 1 << 20
NICENESS = 5  # of children: other requests' tokens come first


class CompileRequest(NamedTuple):
    """A grammar to compile; `number` identifies it in the verdict. `seconds` is for a short try."""

    number: int
    grammar: Grammar
    seconds: float | None = None


class Verdict(NamedTuple):
    """`error` says why a grammar cannot be used; None if it can. `is_late`: its time was up."""

    number: int
    error: str | None
    is_late: bool = False


class Limits(NamedTuple):
    """What one grammar may use; the memory is in addition to that of the open compiler."""

    seconds: float
    num_bytes: int


def encode(message: CompileRequest | Verdict) -> bytes:
    """The message as a length-prefixed frame."""
    payload = msgspec.msgpack.encode(message)
    return HEADER.pack(len(payload)) + payload


def first_error(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    """Compile the grammar and its first mask. Returns why it cannot be used, or None."""
    try:
        mask = compiler.compile(grammar).mask()
    except GrammarError as error:
        return str(error).removesuffix(".")
    return None if any(mask.bits) else "no text of this model's tokens can match it"


@dataclass(frozen=True, slots=True)
class _Child:
    number: int
    pid: int
    pipe: int  # from which its verdict is read
    deadline: float


class CompileProcess:
    """Forks a child for each request on the socket and answers with its verdict."""

    def __init__(
        self, connection: socket.socket, compiler: GrammarCompiler, limits: Limits
    ) -> None:
        self._connection = connection
        self._compiler = compiler
        self._limits = limits
        self._children: dict[int, _Child] = {}  # by pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._frames = FrameReader()

    def run(self) -> None:
        """Serve until the socket is closed."""
        try:
            while True:
                for key, _ in self._selector.select(self._seconds_left()):
                    if key.fileobj is not self._connection:
                        self._finish(self._children[key.fd])
                    elif not self._receive():
                        return
                for child in [c for c in self._children.values() if c.deadline <= _now()]:
                    self._kill(child)
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _receive(self) -> bool:
        """Start the children of the requests that have arrived; False at the end."""
        piece = self._connection.recv(RECEIVE_BYTES)
        for payload in self._frames.feed(piece):
            self._fork(msgspec.msgpack.decode(payload, type=CompileRequest))
        return bool(piece)

    def _fork(self, request: CompileRequest) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            _run_child(self._compiler, request.grammar, write_end, self._limits)
        os.close(write_end)
        seconds = self._limits.seconds if request.seconds is None else request.seconds
        deadline = _now() + seconds
        self._children[read_end] = _Child(request.number, pid, read_end, deadline)
        self._selector.register(read_end, selectors.EVENT_READ)

    def _finish(self, child: _Child) -> None:
        """The child has written its verdict or ended without one."""
        payload = os.read(child.pipe, RECEIVE_BYTES)
        if payload:
            error: str | None = msgspec.msgpack.decode(payload, type=str | None)
        else:
            error = f"it needs more than {self._limits.num_bytes // MIB} MiB to compile"
        self._answer(child, error)

    def _kill(self, child: _Child) -> None:
        os.kill(child.pid, signal.SIGKILL)
        error = f"it takes longer than {self._limits.seconds:g} seconds to compile"
        self._answer(child, error, is_late=True)

    def _answer(self, child: _Child, error: str | None, *, is_late: bool = False) -> None:
        os.waitpid(child.pid, 0)
        del self._children[child.pipe]
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        self._connection.sendall(encode(Verdict(child.number, error, is_late)))

    def _seconds_left(self) -> float | None:
        """Until the next deadline; None if no child runs."""
        deadlines = [child.deadline for child in self._children.values()]
        return max(0.0, min(deadlines) - _now()) if deadlines else None


def _run_child(compiler: GrammarCompiler, grammar: Grammar, pipe: int, limits: Limits) -> None:
    """Write the verdict and exit; a child that exceeds its memory exits without one."""
    with contextlib.suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # native code prints aborts
        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(limits.seconds) + 1,) * 2)
        if (used := _address_space()) is not None:
            resource.setrlimit(resource.RLIMIT_AS, (used + limits.num_bytes,) * 2)
        os.write(pipe, msgspec.msgpack.encode(first_error(compiler, grammar)))
    os._exit(0)


def _address_space() -> int | None:
    """Bytes of this process's address space; None if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return pages * resource.getpagesize()


def _now() -> float:
    return time.monotonic()


def main() -> None:
    """The entry point; see the module's docstring."""
    descriptor, loader, directory, seconds, num_bytes = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    module, _, name = loader.partition(":")
    table: TokenTable = getattr(import_module(module), name)(Path(directory))
    compiler = open_compiler(table, len(table.tokens))
    CompileProcess(connection, compiler, Limits(float(seconds), int(num_bytes))).run()


if __name__ == "__main__":
    main()
