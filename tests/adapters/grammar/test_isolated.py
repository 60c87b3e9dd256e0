import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from adapters.grammar.isolated import IsolatedCompiler
from engine.errors import Unavailable
from engine.step import Grammar, GrammarKind

BUILTIN = Path(__file__).parents[3] / "adapters" / "builtin"
LOADER = "adapters.tokenizers:load_token_table"
HOSTILE = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 1022117}')
GOOD = Grammar(GrammarKind.REGEX, "[a-z]+")
MIB = 1 << 20


@contextlib.asynccontextmanager
async def running(seconds: float, **limits: Any) -> AsyncIterator[IsolatedCompiler]:
    compiler = IsolatedCompiler(LOADER, BUILTIN, seconds=seconds, **limits)
    try:
        yield compiler
    finally:
        await compiler.close()
    assert not psutil.Process().children(recursive=True)


@pytest.fixture(name="compiler")
async def _compiler() -> AsyncIterator[IsolatedCompiler]:
    async with running(0.5) as compiler:
        yield compiler


async def test_a_good_grammar_has_no_error_and_a_bad_one_says_why(
    compiler: IsolatedCompiler,
) -> None:
    assert await compiler.check(GOOD) is None
    assert "regex" in str(await compiler.check(Grammar(GrammarKind.REGEX, "(a")))
    unknown = await compiler.check(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "strin"}'))
    assert "Invalid type: strin" in str(unknown)


async def test_a_grammar_that_takes_too_long_is_killed_and_delays_no_other(
    compiler: IsolatedCompiler,
) -> None:
    await compiler.check(GOOD)  # the vocabulary is open
    began = time.monotonic()
    hostile = asyncio.create_task(compiler.check(HOSTILE))
    for number in range(3):
        assert await compiler.check(Grammar(GrammarKind.REGEX, f"a{number}")) is None
    assert await hostile == "it takes longer than 0.5 seconds to compile"
    assert time.monotonic() - began < 20  # it would take 40 s on an idle machine
    assert await compiler.check(GOOD) is None
    (process,) = psutil.Process().children()
    assert not process.children()


async def test_a_short_try_ends_early_and_says_nothing_of_the_grammar() -> None:
    async with running(60.0) as compiler:
        with pytest.raises(TimeoutError):
            await compiler.check(HOSTILE, 0.1)
        assert await compiler.check(GOOD, 60.0) is None
        (process,) = psutil.Process().children()
        assert not process.children()


async def test_a_grammar_that_needs_too_much_memory_is_rejected() -> None:
    async with running(60.0, num_bytes=32 * MIB) as compiler:
        assert await compiler.check(HOSTILE) == "it needs more than 32 MiB to compile"
        assert await compiler.check(GOOD) is None


async def test_many_large_grammars_at_once_are_all_answered(compiler: IsolatedCompiler) -> None:
    words = ", ".join(f'"word {number}"' for number in range(3000))
    grammars = [Grammar(GrammarKind.CHOICE, f'["{number}", {words}]') for number in range(4)]
    errors = await asyncio.gather(*(compiler.check(grammar) for grammar in grammars))
    assert set(errors) <= {None, "it takes longer than 0.5 seconds to compile"}


async def test_checks_fail_if_the_process_is_lost_and_the_next_one_starts_another(
    compiler: IsolatedCompiler,
) -> None:
    await compiler.check(GOOD)
    (process,) = psutil.Process().children()
    pending = asyncio.create_task(compiler.check(HOSTILE))
    await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="was lost"):
        await pending
    assert await compiler.check(GOOD) is None


async def test_a_process_that_does_not_answer_is_replaced() -> None:
    async with running(0.1, answer_seconds=1.0) as compiler:
        for _ in range(5):  # the first start may take longer than the process may
            with contextlib.suppress(Unavailable):
                await compiler.check(GOOD)
                break
        (process,) = psutil.Process().children()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="was lost"):
            await compiler.check(GOOD)
        await asyncio.to_thread(process.wait)
        compiler._verdict_seconds = 60.0
        assert await compiler.check(GOOD) is None


async def test_close_ends_a_compilation_in_progress() -> None:
    compiler = IsolatedCompiler(LOADER, BUILTIN, seconds=60.0)
    await compiler.check(GOOD)
    pending = asyncio.create_task(compiler.check(HOSTILE))
    (process,) = psutil.Process().children()
    await asyncio.sleep(0)  # it is sent
    await compiler.check(GOOD)  # answered while the child of the other one runs
    assert process.children()
    await compiler.close()
    await compiler.close()
    with pytest.raises(Unavailable):
        await pending
    assert not psutil.Process().children(recursive=True)
