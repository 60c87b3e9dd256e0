"""A process that compiles grammars in children, which are limited in time and memory and killed.

The process opens the compiler once. For each grammar it forks a child that compiles the grammar and
computes the first two masks (`adapters.isolation.children`).

    python -m adapters.grammar.compile_process FD LOADER DIRECTORY SECONDS BYTES
"""

import socket
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import msgspec

from adapters.isolation.children import RECEIVE_BYTES, Children, Limits, Outcome, connect
from engine.grammar import GrammarCompiler, GrammarError, TokenTable
from engine.step import Grammar
from engine.transport.wire import HEADER, FrameReader

MIB = 1 << 20


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


def encode(message: CompileRequest | Verdict) -> bytes:
    """The message as a length-prefixed frame."""
    payload = msgspec.msgpack.encode(message)
    return HEADER.pack(len(payload)) + payload


def first_error(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    """Compile the grammar and its masks before and after a first token: many a grammar that is too
    large has the first one. Returns why it cannot be used, or None."""
    try:
        matcher = compiler.compile(grammar)
        mask = matcher.mask()
        allowed = int.from_bytes(mask.bits, "little")
        if not allowed:
            return "no text of this model's tokens can match it"
        first = allowed & -allowed  # the end token is the last one
        if not (mask.accepts and first == allowed):
            matcher.feed((first.bit_length() - 1,))
            matcher.mask()
    except GrammarError as error:
        return str(error).removesuffix(".")
    return None


class CompileProcess:
    """Forks a child for each request on the socket and answers with its verdict."""

    def __init__(
        self, connection: socket.socket, compiler: GrammarCompiler, limits: Limits
    ) -> None:
        self._connection = connection
        self._compiler = compiler
        self._children = Children(limits)
        self._frames = FrameReader()

    def run(self) -> None:
        """Serve until the socket is closed."""
        self._children.serve(self._connection, self._receive, self._answer)

    def _receive(self) -> bool:
        """Start the children of the requests that have arrived; False at the end."""
        piece = self._connection.recv(RECEIVE_BYTES)
        for payload in self._frames.feed(piece):
            request = msgspec.msgpack.decode(payload, type=CompileRequest)
            work = partial(_verdict, self._compiler, request.grammar)
            self._children.fork(request.number, work, request.seconds)
        return bool(piece)

    def _answer(self, outcome: Outcome) -> None:
        limits = self._children.limits
        if outcome.is_late:
            error: str | None = f"it takes longer than {limits.seconds:g} seconds to compile"
        elif outcome.output:
            error = msgspec.msgpack.decode(outcome.output, type=str | None)
        else:
            error = f"it needs more than {limits.num_bytes // MIB} MiB to compile"
        self._connection.sendall(encode(Verdict(outcome.number, error, outcome.is_late)))


def _verdict(compiler: GrammarCompiler, grammar: Grammar) -> bytes:
    return msgspec.msgpack.encode(first_error(compiler, grammar))


def main() -> None:
    """The entry point; see the module's docstring."""
    # Here, because the server imports this module and needs no grammar library
    from adapters.grammar.llguidance_masks import LlguidanceCompiler

    descriptor, loader, directory, seconds, num_bytes = sys.argv[1:]
    connection = connect(descriptor)
    module, _, name = loader.partition(":")
    table: TokenTable = getattr(import_module(module), name)(Path(directory))
    compiler = LlguidanceCompiler(table, len(table.tokens))
    CompileProcess(connection, compiler, Limits(float(seconds), int(num_bytes))).run()


if __name__ == "__main__":
    main()
