"""Random JSON schemas on random weights at temperature 1: what finishes validates.

`examples/benchmarks/grammar/conformance.py` does the same with a thousand.
"""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest

import adapters
from adapters.tokenizers import load_token_table
from engine.grammar import TokenTable
from engine.request import FinishReason, RequestSpec
from engine.step import Grammar, GrammarKind, SamplingParams
from engine.worker.process.worker import Worker
from examples.benchmarks.grammar.random_schemas import random_schemas
from tests.inline import RequestOutcome, play
from tests.models.checkpoints import make_checkpoint
from tests.worker_settings import worker_settings

BUILTIN = Path(adapters.__file__).parent / "builtin"


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return load_token_table(BUILTIN)


@pytest.fixture(scope="module")
def worker(table: TokenTable, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    directory = tmp_path_factory.mktemp("random")
    size = len(table.tokens)
    make_checkpoint(directory, "llama", vocab_size=size, max_position_embeddings=512)
    shutil.copy(BUILTIN / "tokenizer.json", directory)
    return Worker.load(worker_settings(str(directory), kv_slots=8192), lambda *_: None)


def specs_for(schemas: list[dict[str, object]], table: TokenTable) -> list[RequestSpec]:
    return [
        RequestSpec(
            prompt=tuple(table.encode(f"Number {number}: ")),
            max_tokens=150,
            sampling=SamplingParams(temperature=1.0, seed=number),
            end_ids=frozenset({table.special["<|im_end|>"]}),
            grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        )
        for number, schema in enumerate(schemas)
    ]


def text_of(outcome: RequestOutcome, table: TokenTable) -> str:
    return b"".join(table.tokens[token] for token in outcome.tokens).decode()


def test_finished_outputs_validate_and_do_not_depend_on_batching(
    worker: Worker, table: TokenTable
) -> None:
    schemas = random_schemas(50, seed=7)
    specs = specs_for(schemas, table)
    outcomes = play(worker, specs, max_batch_size=32)
    assert [one.error for one in outcomes] == [None] * 50
    assert sum(one.finish is FinishReason.STOP for one in outcomes) > 25
    for schema, one in zip(schemas, outcomes, strict=True):
        if one.finish is FinishReason.STOP:
            value = json.loads(text_of(one, table))
            jsonschema.Draft202012Validator(schema).validate(value)
    for spec, one in list(zip(specs, outcomes, strict=True))[::5]:
        assert play(worker, [spec])[0].tokens == one.tokens
