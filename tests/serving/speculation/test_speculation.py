"""Speculation changes no output: any drafts, any parameters, over a model that computes.

`PODWAY_EXAMPLES=1000` runs as many cases.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import adapters
from adapters.tokenizers import load_token_table
from engine.grammar import TokenTable
from engine.request import RequestSpec
from engine.step import Grammar, GrammarKind, SamplingParams
from engine.worker.process.worker import Worker
from tests.inline import play
from tests.models.drafts import a_drafter, a_model_drafter, first_layers
from tests.serving.speculation.disturbances import cases, disturbances, results
from tests.worker_settings import worker_settings

BUILTIN = Path(adapters.__file__).parent / "builtin"
GRAMMARS = (
    Grammar(GrammarKind.REGEX, "[a-z ]{30,40}"),
    Grammar(GrammarKind.JSON_OBJECT),
    Grammar(GrammarKind.CHOICE, '["once upon a time", "once there was a cat", "no"]'),
)
PROMPTS = ("Write a story.", "One day, Tom and Tom and Tom and", "a")


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return load_token_table(BUILTIN)


SETTINGS = worker_settings(
    str(BUILTIN), block_size=4, kv_slots=1024, host_kv_memory=1 << 22, threads=1, lookahead=1
)


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker.load(SETTINGS, lambda *_: None)


@pytest.fixture(scope="module")
def worker_with_draft(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """Its draft model is the first three of the model's four layers: often right, and often not."""
    draft = first_layers(BUILTIN, tmp_path_factory.mktemp("draft") / "model", 3)
    return Worker.load(replace(SETTINGS, draft_model=str(draft)), lambda *_: None)


@pytest.fixture(scope="module")
def worker_with_itself() -> Worker:
    """Its draft model is the model, so each proposal is right if its KV is."""
    return Worker.load(replace(SETTINGS, draft_model=str(BUILTIN)), lambda *_: None)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    one = draw(st.sampled_from(range(4)))
    return SamplingParams(
        temperature=draw(st.sampled_from((0.0, 0.7, 1.0))),
        top_p=draw(st.sampled_from((1.0, 0.9))),
        top_k=draw(st.sampled_from((0, 20))),
        min_p=draw(st.sampled_from((0.0, 0.05))),
        repetition_penalty=1.3 if one == 1 else 1.0,
        presence_penalty=0.8 if one == 2 else 0.0,
        frequency_penalty=0.5 if one == 2 else 0.0,
        logit_bias=((65, 2.0), (300, -100.0)) if one == 3 else (),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def spec_lists(draw: st.DrawFn, table: TokenTable) -> list[RequestSpec]:
    ends = frozenset({table.special["<|im_end|>"], table.special["<|endoftext|>"]})
    found = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = tuple(table.encode(draw(st.sampled_from(PROMPTS))))
        common = draw(st.sampled_from(prompt))
        found.append(
            RequestSpec(
                prompt,
                draw(st.integers(1, 24)),
                draw(samplings()),
                end_ids=ends | ({common} if draw(st.booleans()) else set()),
                min_tokens=draw(st.sampled_from((0, 0, 5, 12))),
                logprobs=draw(st.sampled_from((None, 0, 3))),
                prompt_logprobs=draw(st.sampled_from((None, None, 1))),
                grammar=draw(st.sampled_from((None, None, *GRAMMARS))),
            )
        )
    return found


@cases(30)
@given(data=st.data())
def test_any_drafts_leave_every_output_as_it_is(
    worker: Worker, table: TokenTable, data: st.DataObject
) -> None:
    specs = data.draw(spec_lists(table))
    plain = play(worker, specs)
    drafter = a_drafter(
        [one.tokens for one in plain],
        data.draw(st.sampled_from((0.0, 0.1, 0.5, 1.0))),
        data.draw(st.integers(0, 5)),
        data.draw(st.integers(1, 7)),
    )
    drafted = play(worker, specs, drafter=drafter, **disturbances(data, num_blocks=(0, 16)))
    assert results(drafted) == results(plain)


@cases(30)
@given(data=st.data())
def test_a_draft_model_leaves_every_output_as_it_is(
    worker: Worker, worker_with_draft: Worker, table: TokenTable, data: st.DataObject
) -> None:
    specs = data.draw(spec_lists(table))
    few = disturbances(data, num_blocks=(0, 16), max_batch_tokens=(8, 64, 512))
    drafter = a_model_drafter(data.draw(st.integers(1, 7)))
    drafted = play(worker_with_draft, specs, drafter=drafter, **few)
    assert results(drafted) == results(play(worker, specs))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"lookahead": 1},
        {"num_blocks": 48},  # two requests are swapped out, or preempted, in turn
        {"dies_in": (6, 11)},
        {"max_batch_tokens": 64},
    ],
    ids=str,
)
def test_the_draft_models_kv_is_right_wherever_it_proposes(
    worker: Worker,
    worker_with_itself: Worker,
    table: TokenTable,
    temperature: float,
    bounds: dict[str, Any],
) -> None:
    prompt = tuple(table.encode("Once upon a time there was a cat. " * 6))
    specs = [
        RequestSpec(prompt, 24, SamplingParams(temperature=temperature, seed=seed))
        for seed in range(3)
    ]
    drafter = a_model_drafter()
    drafted = play(worker_with_itself, specs, drafter=drafter, **bounds)
    assert results(drafted) == results(play(worker, specs))
    assert drafter.counts.num_drafts == drafter.counts.num_accepted >= 15


def test_an_output_follows_a_shared_prefix_without_draft_kv(
    worker_with_itself: Worker, table: TokenTable
) -> None:
    prompt = tuple(table.encode("One day, Tom and his dog went to the park."))
    specs = [RequestSpec(prompt, 16, SamplingParams(seed=1), label=str(at)) for at in range(2)]
    drafter = a_model_drafter()
    first, second = play(worker_with_itself, specs, drafter=drafter, max_batch_size=1)
    assert second.request.num_cached > 0
    assert first.tokens == second.tokens
    assert drafter.counts.num_drafts == drafter.counts.num_accepted >= 15
