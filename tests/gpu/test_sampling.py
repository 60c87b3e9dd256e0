"""Sampled, constrained and scored outputs of a whole worker on each device, two steps in flight."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import adapters
from adapters.tokenizers import load_token_table
from engine.request import FinishReason, RequestSpec
from engine.step import Grammar, GrammarKind, SampleSpec, SamplingParams
from engine.worker.process.worker import Worker
from tests.contracts.test_sampling import SPECS, accepted
from tests.gpu.pairs import PRECISIONS, gentle_model, logits_of, pair_of, settings_on
from tests.gpu.test_features import outcomes_of
from tests.serving import test_logprobs as scores

ON_EACH_DEVICE = pytest.mark.parametrize("device", PRECISIONS)
BUILTIN = Path(adapters.__file__).parent / "builtin"
PATTERN = r"[a-z]{3,6}@(home|work)\.org"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
GRAMMARS = (
    Grammar(GrammarKind.REGEX, PATTERN),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA | {"additionalProperties": False})),
    None,
)
PROMPT = (5, 17, 17, 60, 3, 44, 5, 5)
SEEDS = 4
SAMPLED = [
    RequestSpec(PROMPT, 6, replace(row.sampling, seed=seed))
    for row in SPECS.values()
    for seed in range(SEEDS)
]


@ON_EACH_DEVICE
async def test_tokens_are_those_of_seed_and_position(
    device: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """With filters, biases and penalties, many for one prompt. In bfloat16 some tokens are near a
    border."""
    pair, right, count = pair_of(gentle_model("llama"), tmp_path, device, lookahead=1), 0, 0
    for request, outcome in zip(SAMPLED, await outcomes_of(pair.worker, SAMPLED), strict=True):
        assert len(outcome.tokens) == request.max_tokens
        logits = logits_of(pair.model, [*PROMPT, *outcome.tokens]).double().numpy()
        for at, token in enumerate(outcome.tokens, len(PROMPT)):
            output = tuple(outcome.tokens[: at - len(PROMPT)])
            row = SampleSpec(request.sampling, prompt=PROMPT, output=output)
            right += token in accepted(logits[at - 1], row, at)
            count += 1
    record_property("right tokens", f"{right} of {count}")
    assert right >= count * (0.9 if device == "cuda" else 1.0)


@ON_EACH_DEVICE
async def test_log_probabilities_of_prompts_and_outputs(device: str, tmp_path: Path) -> None:
    pair = pair_of(gentle_model("llama"), tmp_path, device, lookahead=1)
    specs = [scores.spec_for(1 + 7 * n, n, (scores.GREEDY, scores.HOT)[n % 2]) for n in range(8)]
    size = float(logits_of(pair.model, [1, 2, 3]).square().mean().sqrt())
    tolerance = max(scores.TOLERANCE, 4 * pair.tolerance * size)
    for spec, outcome in zip(specs, await outcomes_of(pair.worker, specs), strict=True):
        own = scores.Pair(pair.model, pair.worker)
        scores.assert_logprobs(own, spec, outcome, tolerance)


@ON_EACH_DEVICE
async def test_constrained_outputs_match_their_grammars(device: str) -> None:
    """Beside free ones, drawn and greedy."""
    settings = settings_on(device, BUILTIN, lookahead=1, kv_slots=4096, max_model_len=512)
    worker, table = Worker.load(settings, lambda *_: None), load_token_table(BUILTIN)
    prompt, ends = tuple(table.encode("Write, please.")), frozenset({table.special["<|im_end|>"]})
    specs = [
        RequestSpec(
            prompt, 60, SamplingParams(seed % 2, seed=seed), ends, grammar=GRAMMARS[seed % 3]
        )
        for seed in range(9)
    ]
    outcomes = await outcomes_of(worker, specs)
    assert [one.error for one in outcomes] == [None] * len(specs)
    for number, outcome in enumerate(outcomes):
        text = b"".join(table.tokens[token] for token in outcome.tokens).decode(errors="replace")
        if number % 3 == 0:
            assert outcome.finish is FinishReason.STOP
            assert re.fullmatch(PATTERN, text)
        elif number % 3 == 1 and outcome.finish is FinishReason.STOP:
            assert isinstance(json.loads(text)["age"], int)
    assert sum(one.finish is FinishReason.STOP for one in outcomes) >= 4
