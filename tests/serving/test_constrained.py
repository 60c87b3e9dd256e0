"""Constrained outputs, through the whole engine and over the built-in vocabulary.

They match their grammars, and do not depend on other requests of the batch or on recomputation.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import adapters
from adapters.tokenizers import load_token_table
from engine.errors import NoAllowedToken
from engine.grammar import TokenTable
from engine.request import FinishReason, RequestSpec
from engine.step import Grammar, GrammarKind, SamplingParams
from engine.worker.process.worker import Worker
from tests.inline import RequestOutcome, play
from tests.worker_settings import worker_settings

BUILTIN = Path(adapters.__file__).parent / "builtin"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
PATTERN = r"[a-z]{3,6}@(home|work)\.org"
MATCHES = Grammar(GrammarKind.REGEX, PATTERN)
LONG = Grammar(GrammarKind.REGEX, "[a-z]{300,320}")


@pytest.fixture(scope="module")
def worker() -> Worker:
    settings = worker_settings(str(BUILTIN), block_size=4, kv_slots=2048, threads=1)
    return Worker.load(settings, lambda *_: None)


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return load_token_table(BUILTIN)


def spec_for(table: TokenTable, grammar: Grammar, seed: int, **changes: Any) -> RequestSpec:
    ends = frozenset({table.special["<|im_end|>"], table.special["<|endoftext|>"]})
    fields: dict[str, Any] = {"end_ids": ends, "max_tokens": 80} | changes
    prompt = tuple(table.encode(f"Write number {seed}, please."))
    return RequestSpec(prompt, sampling=SamplingParams(seed=seed), grammar=grammar, **fields)


def text_of(table: TokenTable, outcome: RequestOutcome) -> str:
    return b"".join(table.tokens[token] for token in outcome.tokens).decode()


def test_finished_outputs_match_their_grammar(worker: Worker, table: TokenTable) -> None:
    specs = [spec_for(table, (JSON, MATCHES)[seed % 2], seed) for seed in range(16)]
    outcomes = play(worker, specs)
    assert [one.error for one in outcomes] == [None] * 16
    assert sum(one.finish is FinishReason.STOP for one in outcomes) >= 14
    for spec, one in zip(specs, outcomes, strict=True):
        if one.finish is FinishReason.STOP:
            text = text_of(table, one)
            if spec.grammar is JSON:
                jsonschema.validate(json.loads(text), SCHEMA)
            else:
                assert re.fullmatch(PATTERN, text)
    assert len({tuple(one.tokens) for one in outcomes}) == 16


def mixed(table: TokenTable) -> list[RequestSpec]:
    free = replace(spec_for(table, JSON, 90, max_tokens=30), grammar=None)
    greedy = replace(spec_for(table, JSON, 91), sampling=SamplingParams(temperature=0.0))
    late_end = spec_for(table, MATCHES, 92, min_tokens=3)
    long = [spec_for(table, LONG, seed) for seed in (93, 94)]
    return [spec_for(table, JSON, 1), free, spec_for(table, MATCHES, 2), greedy, late_end, *long]


def test_batching_chunks_preemption_and_a_lost_worker_change_no_output(
    worker: Worker, table: TokenTable
) -> None:
    specs = mixed(table)
    alone = [play(worker, [spec])[0].tokens for spec in specs]
    assert [one.tokens for one in play(worker, specs)] == alone
    assert [
        one.tokens for one in play(worker, specs, max_batch_tokens=7, max_batch_size=7)
    ] == alone
    outcomes = play(worker, specs, num_blocks=25, max_batch_tokens=16, max_batch_size=7)
    assert sum(one.request.setbacks.num_preemptions for one in outcomes) > 0
    assert [one.tokens for one in outcomes] == alone
    assert [one.tokens for one in play(worker, specs, dies_in=(4, 9, 20))] == alone
    ahead = play(worker, specs, num_blocks=25, dies_in=(6, 15), lookahead=1, max_batch_size=7)
    assert [one.tokens for one in ahead] == alone


def test_a_complete_grammar_ends_the_output_despite_ignore_eos(
    worker: Worker, table: TokenTable
) -> None:
    once = Grammar(GrammarKind.CHOICE, '["yes"]')
    ends = spec_for(table, once, 1).end_ids
    eager = spec_for(table, once, 1, min_tokens=50)
    ignoring = spec_for(table, once, 1, avoided_ids=ends)
    for one in play(worker, [eager, ignoring]):
        assert (one.finish, text_of(table, one)) == (FinishReason.STOP, "yes")


def test_avoided_end_tokens_come_only_when_the_grammar_is_complete(
    worker: Worker, table: TokenTable
) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a{0,40}")
    willing = spec_for(table, grammar, 1)
    (short,) = play(worker, [willing])
    (long,) = play(worker, [replace(willing, avoided_ids=willing.end_ids)])
    assert text_of(table, long) == "a" * 40
    assert len(text_of(table, short)) < 40


def test_a_stop_token_of_the_request_comes_when_the_output_is_complete(
    worker: Worker, table: TokenTable
) -> None:
    (mark,) = table.encode("!")
    for one in play(
        worker, [spec_for(table, MATCHES, n, end_ids=frozenset({mark})) for n in range(4)]
    ):
        assert one.finish is FinishReason.STOP
        assert one.tokens[-1] == mark
        assert re.fullmatch(PATTERN, text_of(table, one)[:-1])


def test_a_model_without_end_tokens_fails_when_its_grammar_is_complete(
    worker: Worker, table: TokenTable
) -> None:
    spec = spec_for(table, Grammar(GrammarKind.CHOICE, '["yes"]'), 1, end_ids=frozenset())
    (one,) = play(worker, [spec])
    assert isinstance(one.error, NoAllowedToken)
    assert text_of(table, one) == "yes"
