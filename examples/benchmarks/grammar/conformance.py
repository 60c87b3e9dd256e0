"""Random JSON schemas on random weights at temperature 1: every output that finishes validates.

    python -m examples.benchmarks.grammar.conformance [--schemas 1000] [--seed 1] [--max-tokens 400]

A tiny model with random weights and the built-in vocabulary runs one request per schema, all at
the same time. Outputs that end at `max_tokens` are counted separately; a finished one that is not
valid JSON, or not valid under its schema, is an error. Then every output is fed to its grammar
again to time the masks (CPU time of the thread, as for compiling).
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

from adapters.grammar.llguidance_masks import LlguidanceCompiler
from adapters.tokenizers import load_token_table
from engine.grammar import GrammarCompiler, GrammarError, TokenTable
from engine.request import FinishReason, RequestSpec
from engine.step import Grammar, GrammarKind, SamplingParams
from examples.benchmarks.grammar.random_schemas import Schema, random_schemas
from examples.benchmarks.grammar.serving import BUILTIN, Output, random_worker, serve

TABLE = "{:34}{:>12}"


def spec_of(schema: Schema, table: TokenTable, seed: int, max_tokens: int) -> RequestSpec:
    return RequestSpec(
        prompt=tuple(table.encode(f"Number {seed}: ")),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=1.0, seed=seed),
        end_ids=frozenset({table.special["<|im_end|>"]}),
        grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
    )


def verdict(schema: Schema, output: Output, table: TokenTable) -> str:
    """How one output ended; "INVALID" must not occur."""
    if output.error is not None:
        return f"failed: {output.error}"
    if output.finish is not FinishReason.STOP:
        return "cut by max_tokens"
    try:
        text = b"".join(table.tokens[token] for token in output.tokens).decode()
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"INVALID: {str(error).splitlines()[0]}"
    return "finished and valid"


def time_masks(compiler: GrammarCompiler, spec: RequestSpec, output: Output) -> list[float]:
    """Milliseconds per token of an output: accept the token, then compute the next mask."""
    assert spec.grammar is not None
    matcher = compiler.compile(spec.grammar)
    matcher.mask()
    spent = []
    for token in output.tokens:
        if token in spec.end_ids:
            break
        started = time.thread_time()
        matcher.feed([token])
        matcher.mask()
        spent.append(1000 * (time.thread_time() - started))
    return spent


def print_quantiles(title: str, values: list[float]) -> None:
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
    compiler = LlguidanceCompiler(table, len(table.tokens))
    schemas = random_schemas(flags.schemas, flags.seed)
    compiling: list[float] = []
    served: list[tuple[Schema, RequestSpec]] = []
    rejected: Counter[str] = Counter()
    for number, schema in enumerate(schemas):
        spec = spec_of(schema, table, number, flags.max_tokens)
        started = time.thread_time()
        try:
            assert spec.grammar is not None
            compiler.compile(spec.grammar)
        except GrammarError as error:
            rejected[f"rejected: {error}"] += 1
            continue
        compiling.append(1000 * (time.thread_time() - started))
        served.append((schema, spec))
    with tempfile.TemporaryDirectory() as directory:
        worker = random_worker(Path(directory))
        started = time.perf_counter()
        outputs = serve(worker, [spec for _, spec in served])
        seconds = time.perf_counter() - started
    found = Counter(
        verdict(schema, one, table) for (schema, _), one in zip(served, outputs, strict=True)
    )
    for what, count in (found + rejected).most_common():
        print(TABLE.format(what, count))
    masks = [
        ms
        for (_, spec), one in zip(served, outputs, strict=True)
        for ms in time_masks(compiler, spec, one)
    ]
    print(TABLE.format("tokens", sum(len(one.tokens) for one in outputs)))
    print(TABLE.format("seconds for all", f"{seconds:.1f}"))
    print_quantiles("compiling", compiling)
    print_quantiles("mask of a token", masks)
    if invalid := sum(
        count for what, count in found.items() if not what.startswith(("fin", "cut"))
    ):
        sys.exit(f"{invalid} outputs are invalid")


if __name__ == "__main__":
    main()
