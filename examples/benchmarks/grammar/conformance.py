"""Random JSON schemas on random weights at temperature 1: every output that finishes validates.

    python -m examples.benchmarks.grammar.conformance [--schemas 1000] [--seed 1] [--max-tokens 400]

A tiny model with random weights and the built-in vocabulary answers one request per schema, all of
them served by the engine together. Outputs that `max_tokens` cuts are counted apart; a finished
one that is not valid JSON, or not valid under its schema, is an error. Then every output is fed to
its grammar again, alone, to time the masks (CPU time of the thread, as for compiling).
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles

import jsonschema

from adapters.grammar import open_compiler
from adapters.tokenizers import load_token_table
from engine.grammar import GrammarCompiler, GrammarError, TokenTable
from engine.request import FinishReason, RequestSpec
from engine.step import Grammar, GrammarKind, SamplingParams
from examples.benchmarks.grammar.random_schemas import Schema, random_schemas
from examples.benchmarks.grammar.serving import BUILTIN, Said, random_worker, serve

TABLE = "{:34}{:>12}"


def ask_for(schema: Schema, table: TokenTable, seed: int, max_tokens: int) -> RequestSpec:
    return RequestSpec(
        prompt=tuple(table.encode(f"Number {seed}: ")),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=1.0, seed=seed),
        end_ids=frozenset({table.special["<|im_end|>"]}),
        grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
    )


def verdict(schema: Schema, said: Said, table: TokenTable) -> str:
    """What became of one output; "INVALID" is what must not be."""
    if said.error is not None:
        return f"failed: {said.error}"
    if said.finish is not FinishReason.STOP:
        return "cut by max_tokens"
    try:
        text = b"".join(table.tokens[token] for token in said.tokens).decode()
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"INVALID: {str(error).splitlines()[0]}"
    return "finished and valid"


def time_masks(compiler: GrammarCompiler, ask: RequestSpec, said: Said) -> list[float]:
    """Milliseconds of each mask of an output, the token fed before it included."""
    assert ask.grammar is not None
    matcher = compiler.compile(ask.grammar)
    matcher.mask()
    spent = []
    for token in said.tokens:
        if token in ask.end_ids:
            break
        started = time.thread_time()
        matcher.feed([token])
        matcher.mask()
        spent.append(1000 * (time.thread_time() - started))
    return spent


def tell(title: str, values: list[float]) -> None:
    cuts = quantiles(values, n=1000)
    for name, value in (("median", cuts[499]), ("p99", cuts[989]), ("p99.9", cuts[998]),
                        ("largest", max(values))):  # fmt: skip
        print(TABLE.format(f"{title}, {name}", f"{value:.3f} ms"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=400)
    flags = parser.parse_args()
    table = load_token_table(BUILTIN)
    compiler = open_compiler(table, len(table.tokens))
    schemas = random_schemas(flags.schemas, flags.seed)
    compiling: list[float] = []
    served: list[tuple[Schema, RequestSpec]] = []
    refused: Counter[str] = Counter()
    for number, schema in enumerate(schemas):
        ask = ask_for(schema, table, number, flags.max_tokens)
        started = time.thread_time()
        try:
            assert ask.grammar is not None
            compiler.compile(ask.grammar)
        except GrammarError as error:
            refused[f"refused: {error}"] += 1
            continue
        compiling.append(1000 * (time.thread_time() - started))
        served.append((schema, ask))
    with tempfile.TemporaryDirectory() as directory:
        worker = random_worker(Path(directory))
        started = time.perf_counter()
        said = serve(worker, [ask for _, ask in served])
        seconds = time.perf_counter() - started
    found = Counter(
        verdict(schema, one, table) for (schema, _), one in zip(served, said, strict=True)
    )
    for what, count in (found + refused).most_common():
        print(TABLE.format(what, count))
    masks = [
        ms
        for (_, ask), one in zip(served, said, strict=True)
        for ms in time_masks(compiler, ask, one)
    ]
    print(TABLE.format("tokens", sum(len(one.tokens) for one in said)))
    print(TABLE.format("seconds for all", f"{seconds:.1f}"))
    tell("compiling", compiling)
    tell("mask of a token", masks)
    if wrong := sum(count for what, count in found.items() if not what.startswith(("fin", "cut"))):
        sys.exit(f"{wrong} outputs are wrong")


if __name__ == "__main__":
    main()
