"""llguidance and xgrammar side by side: coverage, compile time, mask time, errors.

    pip install xgrammar
    python -m examples.benchmarks.grammar.compare_libraries [--random 200] [--vocabulary 151000]

For each handwritten and random schema: does the library support it, and do random walks through
its masks end in valid JSON? Walks sample uniformly from the allowed tokens, with the same seeds
for both. Opening and compiling are CPU time, masks are wall time. Two vocabularies: the built-in
one, and a large one of syllables.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, Protocol

import jsonschema
import numpy as np
import xgrammar

import adapters
from adapters.grammar.llguidance_masks import LlguidanceCompiler
from adapters.tokenizers import load_token_table
from engine.grammar import GrammarError, Matcher, TokenTable
from engine.step import Grammar, GrammarKind
from examples.benchmarks.grammar.by_hand import BY_HAND
from examples.benchmarks.grammar.random_schemas import Schema, random_schemas

BUILTIN = Path(adapters.__file__).parent / "builtin"
MAX_TOKENS = 200
ROW = "| {:12} | {:>9} | {:>9} | {:>8} | {:>9} | {:>9} | {:>8} | {:>8} | {:>8} | {:>8} |"
HEAD = ("library", "open s", "supported", "rejected", "finished", "invalid",
        "compile", "p99", "mask", "p99")  # fmt: skip


class State(Protocol):
    """The state of one output in a grammar."""

    def allowed(self) -> np.ndarray: ...

    def feed(self, token: int) -> None: ...


class Llguidance:
    """Through Podway's adapter; the end token is the id after the vocabulary."""

    def __init__(self, table: TokenTable) -> None:
        self.end = len(table.tokens)
        self._compiler = LlguidanceCompiler(table, self.end)

    def compile(self, schema: str) -> Callable[[], State]:
        """A function that returns initial states; raises `ValueError` if it is not supported."""
        try:
            matcher = self._compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, schema))
        except GrammarError as error:
            raise ValueError(str(error)) from error
        return lambda: LlguidanceState(matcher.copy())


class LlguidanceState:
    """A state of llguidance."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def allowed(self) -> np.ndarray:
        return np.frombuffer(self._matcher.mask().bits, dtype=np.uint8)

    def feed(self, token: int) -> None:
        self._matcher.feed([token])


class Xgrammar:
    """The same vocabulary and end token."""

    def __init__(self, table: TokenTable) -> None:
        self.end = len(table.tokens)
        vocabulary = [*table.tokens, b"</s>"]
        for token_id in table.special.values():
            vocabulary[token_id] = b"<|special|>"
        info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[self.end])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Callable[[], State]:
        """A function that returns initial states; raises `ValueError` if it is not supported."""
        try:
            compiled = self._compiler.compile_json_schema(schema, strict_mode=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return lambda: XgrammarState(compiled, self.end + 1)


class XgrammarState:
    """A state of xgrammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, size)

    def allowed(self) -> np.ndarray:
        self._matcher.fill_next_token_bitmask(self._mask)
        words: np.ndarray = self._mask.numpy().view(np.uint8)[0]
        return words

    def feed(self, token: int) -> None:
        if not self._matcher.accept_token(token):
            raise ValueError(f"token {token} is not accepted")


class Tally:
    """The counts and times of one library."""

    def __init__(self) -> None:
        self.rejected: list[str] = []
        self.invalid: list[str] = []
        self.num_supported = self.num_walks = 0
        self.compile_ms: list[float] = []
        self.mask_us: list[float] = []

    def show(self, name: str, opened: float) -> None:
        compile_p99 = quantiles(self.compile_ms, n=100)[98]
        mask_p99 = quantiles(self.mask_us, n=100)[98]
        times = (f"{median(self.compile_ms):.2f} ms", f"{compile_p99:.1f} ms",
                 f"{median(self.mask_us):.0f} µs", f"{mask_p99:.0f} µs")  # fmt: skip
        counts = (self.num_supported, len(self.rejected), self.num_walks, len(self.invalid))
        print(ROW.format(name, f"{opened:.2f}", *counts, *times))


def large_table(size: int) -> TokenTable:
    """Bytes, JSON punctuation, and words of syllables with and without a leading space."""
    rng = Random(7)
    marks = ['":', '", "', '{"', '"}', "}}", "]}", "\n  ", "\n    ", '":"', "null", "true", "false"]
    found = {bytes([byte]): None for byte in range(256)} | {mark.encode(): None for mark in marks}
    syllables = [
        a + b + c for a in "bcdfgklmnprstvwz" for b in "aeiou" for c in ("", "n", "r", "st")
    ]
    while len(found) < size:
        word = "".join(rng.choices(syllables, k=rng.randrange(1, 5)))
        found[
            (
                rng.choice(["", " ", " "])
                + rng.choice([word, word.title(), str(rng.randrange(1000))])
            ).encode()
        ] = None
    tokens = list(found)
    ids = {token: token_id for token_id, token in enumerate(tokens)}

    def encode(text: str) -> list[int]:
        data, out = text.encode(), []
        while data:
            length = next(n for n in range(min(len(data), 24), 0, -1) if data[:n] in ids)
            out.append(ids[data[:length]])
            data = data[length:]
        return out

    return TokenTable(tokens, {}, encode)


def walk(state: State, end: int, seed: int, spent: list[float]) -> list[int] | None:
    """Tokens sampled uniformly from the allowed ones to the end token; None if there is none."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    for _ in range(MAX_TOKENS):
        started = time.perf_counter()
        bits = state.allowed()
        spent.append(1e6 * (time.perf_counter() - started))
        ids = np.flatnonzero(np.unpackbits(bits, count=end + 1, bitorder="little"))
        if not len(ids):
            raise ValueError("no token is allowed")
        token = int(rng.choice(ids))
        if token == end:
            return tokens
        state.feed(token)
        tokens.append(token)
    return None


def evaluate(library: Any, name: str, schema: Schema, table: TokenTable, tally: Tally) -> None:
    """Compile a schema with a library and walk through it; the results go to `tally`."""
    text = json.dumps(schema)
    started = time.process_time()
    try:
        begin = library.compile(text)
    except ValueError as error:
        tally.rejected.append(f"{name}: {str(error).splitlines()[0][:90]}")
        return
    tally.compile_ms.append(1e3 * (time.process_time() - started))
    tally.num_supported += 1
    for seed in range(3):
        try:
            tokens = walk(begin(), library.end, seed, tally.mask_us)
            if tokens is None:
                continue
            tally.num_walks += 1
            value = json.loads(b"".join(table.tokens[token] for token in tokens))
            jsonschema.Draft202012Validator(schema).validate(value)
        except (ValueError, jsonschema.ValidationError) as error:
            tally.invalid.append(f"{name}: {str(error).splitlines()[0][:90]}")
            return


def compare(table: TokenTable, corpus: dict[str, Schema]) -> None:
    print(ROW.format(*HEAD))
    for make in (Llguidance, Xgrammar):
        started = time.process_time()
        library = make(table)
        opened = time.process_time() - started
        tally = Tally()
        for name, schema in corpus.items():
            evaluate(library, name, schema, table, tally)
        tally.show(make.__name__.lower(), opened)
        for line in sorted({*tally.rejected}):
            print("  rejected", line)
        for line in sorted({*tally.invalid}):
            print("  invalid ", line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=151_000)
    flags = parser.parse_args()
    made = random_schemas(flags.random, seed=3)
    corpus = BY_HAND | {f"random {number}": schema for number, schema in enumerate(made)}
    builtin = load_token_table(BUILTIN)
    for table in (builtin, large_table(flags.vocabulary)):
        print(f"\n{len(table.tokens)} tokens, {len(corpus)} schemas")
        compare(table, corpus)


if __name__ == "__main__":
    main()
