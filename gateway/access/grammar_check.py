"""Grammars are checked before their request is accepted: limits, then compiled, off the loop.

Whatever is wrong with one is an `InvalidRequest` that names the field. The verdict on a grammar is
remembered, so that a schema sent with every request is compiled once here. (The worker compiles
for itself.) The library's own limits bound the work of a thread that was given up on.
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
    """How much a caller's grammar may ask of this server."""

    max_bytes: int = 128 << 10
    max_depth: int = 64
    compile_seconds: float = 5.0
    max_remembered: int = 256


class GrammarCheck:
    """Says of a grammar whether this server can serve it.

    `compiler` is over the vocabulary of the model. `off_loop` runs a function where it does not
    hold the loop up; None: in a few threads of its own.
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
        self._verdicts: OrderedDict[Grammar, asyncio.Task[str | None]] = OrderedDict()

    async def check_grammar(self, grammar: Grammar, param: str) -> None:
        """Return if outputs can be held to `grammar`; else `InvalidRequest` for the field `param`.

        `param` is the field as the caller spelled it, for example
        `response_format.json_schema.schema`.
        """
        complaint = _beyond(grammar, self._limits)
        if complaint is None:
            complaint = await asyncio.shield(self._verdict(grammar))
        if complaint is not None:
            raise InvalidRequest(f"Invalid '{param}': {complaint}.", param)

    def _verdict(self, grammar: Grammar) -> "asyncio.Task[str | None]":
        """The same task for all who ask for the same grammar; None is its consent."""
        task = self._verdicts.pop(grammar, None)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.get_running_loop().create_task(self._judge(grammar), name="grammar")
        self._verdicts[grammar] = task
        if len(self._verdicts) > self._limits.max_remembered:
            self._verdicts.popitem(last=False)
        return task

    async def _judge(self, grammar: Grammar) -> str | None:
        """Compile it in a seat that is held until the thread is done, whoever gave up on it."""
        await self._seats.acquire()
        work = asyncio.ensure_future(self._off_loop(lambda: self._try(grammar)))
        work.add_done_callback(lambda _: self._seats.release())
        seconds = self._limits.compile_seconds
        done, _ = await asyncio.wait({work}, timeout=seconds)
        if not done:
            return f"it takes longer than {seconds:g} seconds to compile"
        return work.result()

    def _try(self, grammar: Grammar) -> str | None:
        """What is wrong with it, if anything is."""
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


def _beyond(grammar: Grammar, limits: GrammarLimits) -> str | None:
    """What can be said against it without compiling it."""
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
    """How deep brackets are nested at most; those in strings count too, to be on the safe side."""
    depth = most = 0
    for char in text:
        if char in BRACKETS:
            depth = max(0, depth + BRACKETS[char])
            most = max(most, depth)
    return most
