"""Grammars are checked before their request is accepted: size limits, then compilation in a thread.

An invalid grammar is an `InvalidRequest` that names the field. Results are cached, so a schema
that is sent with every request is compiled once here. (The worker compiles it again for itself.)
A compilation that takes too long is not waited for; the library's own limits bound its work.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.grammar import GrammarCompiler, GrammarError
from engine.step import Grammar, GrammarKind

THREADS = 2
JSON_KINDS = frozenset({GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE, GrammarKind.TAGS})
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}

OffLoop = Callable[[Callable[[], str | None]], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits on the grammar of one request, and on cached results."""

    max_bytes: int = 128 << 10
    max_depth: int = 64
    compile_seconds: float = 5.0
    max_remembered: int = 256


class GrammarCheck:
    """Checks whether outputs can be constrained to a grammar.

    `compiler` compiles for the model's vocabulary. `off_loop` runs a function off the event loop;
    None: in `THREADS` threads of its own.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        limits: GrammarLimits | None = None,
        off_loop: OffLoop | None = None,
    ) -> None:
        self._compiler = compiler
        self._limits = limits or GrammarLimits()
        self._off_loop = off_loop or _in_threads()
        self._seats = asyncio.Semaphore(THREADS)
        self._results: OrderedDict[Grammar, asyncio.Task[str | None]] = OrderedDict()

    async def check_grammar(self, grammar: Grammar, param: str) -> None:
        """Return if outputs can be constrained to `grammar`; else raise `InvalidRequest`.

        `param` is the request field that the error names, for example
        `response_format.json_schema.schema`.
        """
        reason = _limit_error(grammar, self._limits)
        if reason is None:
            reason = await asyncio.shield(self._result(grammar))
        if reason is not None:
            raise InvalidRequest(f"Invalid '{param}': {reason}.", param)

    def _result(self, grammar: Grammar) -> "asyncio.Task[str | None]":
        """One task for all requests with this grammar; its result is the error, or None."""
        task = self._results.pop(grammar, None)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.get_running_loop().create_task(self._compile(grammar), name="grammar")
        self._results[grammar] = task
        if len(self._results) > self._limits.max_remembered:
            self._results.popitem(last=False)
        return task

    async def _compile(self, grammar: Grammar) -> str | None:
        """Compile it in one of `THREADS` seats; the seat stays taken until the thread is done."""
        await self._seats.acquire()
        work = asyncio.ensure_future(self._off_loop(lambda: self._try(grammar)))
        work.add_done_callback(lambda _: self._seats.release())
        seconds = self._limits.compile_seconds
        done, _ = await asyncio.wait({work}, timeout=seconds)
        if not done:
            return f"it takes longer than {seconds:g} seconds to compile"
        return work.result()

    def _try(self, grammar: Grammar) -> str | None:
        """Compile the grammar and its first mask; the error, or None."""
        try:
            mask = self._compiler.compile(grammar).mask()
        except GrammarError as error:
            return str(error).removesuffix(".")
        return None if any(mask.bits) else "no text of this model's tokens can match it"


def _in_threads() -> OffLoop:
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def run(work: Callable[[], str | None]) -> Awaitable[str | None]:
        return asyncio.get_running_loop().run_in_executor(pool, work)

    return run


def _limit_error(grammar: Grammar, limits: GrammarLimits) -> str | None:
    """The first limit that the grammar exceeds, found without compiling it; or None."""
    try:
        num_bytes = len(grammar.text.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if num_bytes > limits.max_bytes:
        return f"it has {num_bytes} bytes; at most {limits.max_bytes} are allowed"
    if (depth := _depth(grammar.text)) > limits.max_depth:
        return f"it is nested {depth} deep; at most {limits.max_depth} is allowed"
    if grammar.kind in JSON_KINDS:
        try:
            json.loads(grammar.text)
        except ValueError as error:
            return f"it is not valid JSON: {error}"
    return None


def _depth(text: str) -> int:
    """The nesting depth of brackets. Brackets in strings count too, so this is an upper bound."""
    depth = most = 0
    for char in text:
        if char in BRACKETS:
            depth = max(0, depth + BRACKETS[char])
            most = max(most, depth)
    return most
