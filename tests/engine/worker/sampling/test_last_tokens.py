from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.control import batch_builder
from engine.request import RequestSpec
from engine.step import (
    LAST_TOKEN,
    Fault,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
)
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.process.worker import Worker
from engine.worker.sampling.last_tokens import FAILED_TOKEN, KnownTokens, LastTokens
from tests.engine.worker.process.driving import GREEDY, load_worker
from tests.inline import play
from tests.models.checkpoints import make_checkpoint

VOCAB = 97
LIMITS = LayoutLimits(VOCAB, 64, 16, 4)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
SAMPLINGS = (
    GREEDY,
    SEEDED,
    replace(SEEDED, presence_penalty=1.5),
    replace(GREEDY, frequency_penalty=0.7),
    replace(GREEDY, repetition_penalty=1.3),
    replace(SEEDED, repetition_penalty=0.8, min_p=0.02, top_k=20),
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(directory, "llama")
    return load_worker(directory, attention="cpu", kv_slots=1024)


def texts(
    worker: Worker, asks: Sequence[RequestSpec], lookahead: int, num_blocks: int
) -> list[list[int]]:
    """The outputs of all requests, served at once."""
    bounds: dict[str, Any] = {"max_batch_size": 8, "max_batch_tokens": 16}
    outcomes = play(worker, asks, num_blocks=num_blocks, lookahead=lookahead, **bounds)
    return [outcome.tokens for outcome in outcomes]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("num_blocks", [256, 40])
def test_remembered_outputs_change_no_text(
    worker: Worker, num_blocks: int, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under penalties, also after preemptions: against outputs that are sent with every step."""
    specs = [
        RequestSpec(tuple(range(1 + at, 4 + 3 * at)), max_tokens=30, sampling=sampling)
        for at, sampling in enumerate(SAMPLINGS)
    ]
    remembered = texts(worker, specs, lookahead, num_blocks)
    monkeypatch.setattr(batch_builder, "OUTPUT_KEPT_STEPS", -1)
    assert texts(worker, specs, 0, num_blocks) == remembered


def entry(number: int, token: int, spec: SampleSpec | None = None) -> StepEntry:
    return StepEntry(RequestId(number), 3, (token,), bytes(4), spec or SampleSpec(GREEDY))


def complete(held: LastTokens, *entries: StepEntry) -> tuple[list[int], tuple[StepEntry, ...]]:
    """Token ids of the layout, and the entries, with what is held."""
    step = Step(StepId(9), entries)
    held.open(step)
    step = held.continued(step).complete(step)
    return build_layout(step, LIMITS).token_ids.tolist(), step.entries


def run(held: LastTokens, tokens: Sequence[int], *entries: StepEntry) -> None:
    """A step that samples `tokens`; none: it fails."""
    step = Step(StepId(8), entries)
    held.open(step)
    if tokens:
        held.keep(KnownTokens(tokens))


def test_last_tokens_are_filled_into_the_entries_that_continue_from_them() -> None:
    held = LastTokens(num_steps=1)
    run(held, [70, 71], entry(0, 1), entry(1, 2))
    ids, entries = complete(held, entry(1, LAST_TOKEN), entry(5, 9), entry(0, LAST_TOKEN))
    assert ids == [71, 9, 70]
    assert [each.tokens for each in entries] == [(71,), (9,), (70,)]


class Copied:
    """Tokens that a copy brings to the host; each question may be a call of the driver."""

    ids = None

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.num_asked = 0

    @property
    def is_known(self) -> bool:
        self.num_asked += 1
        return True

    def known(self) -> Sequence[int]:
        self.num_asked += 1
        return self._tokens


def test_a_step_is_asked_once_for_the_tokens_of_all_its_rows() -> None:
    held, copied = LastTokens(num_steps=1), Copied(range(50))
    held.open(Step(StepId(8), tuple(entry(row, 1) for row in range(50))))
    held.keep(copied)
    step = Step(StepId(9), tuple(entry(row, LAST_TOKEN) for row in reversed(range(50))))
    held.open(step)
    continued = held.continued(step)
    assert continued.is_known
    assert continued.tokens() == [*reversed(range(50))]
    assert copied.num_asked == 2


def test_a_failed_step_leaves_the_failed_token() -> None:
    held = LastTokens(num_steps=1)
    run(held, (), entry(0, 1))
    assert complete(held, entry(0, LAST_TOKEN))[0] == [FAILED_TOKEN]


def test_tokens_are_kept_for_num_steps_steps() -> None:
    held = LastTokens(num_steps=2)
    run(held, [70], entry(0, 1))
    run(held, [71], entry(1, 1))
    assert complete(held, entry(0, LAST_TOKEN))[0] == [70]
    with pytest.raises(ValueError, match="request 0: its last token is not on this worker"):
        complete(LastTokens(1), entry(0, LAST_TOKEN))


def test_a_worker_that_fails_a_step_runs_the_one_planned_on_top(worker: Worker) -> None:
    bad = SampleSpec(replace(GREEDY, logit_bias=((VOCAB + 5, 1.0),)))
    blocks = bytes(4)
    first = StepEntry(RequestId(0), 0, (1,) * 3, blocks, bad)
    mate = StepEntry(RequestId(1), 0, (1, 2, 3), b"\1\0\0\0", SampleSpec(GREEDY))
    alone = worker.run(Step(StepId(0), (mate,))).tokens
    try:
        faults = worker.run(Step(StepId(1), (first,))).faults
    except ValueError:
        faults = (Fault(0, "all of it"),)
    assert faults
    ahead = StepEntry(RequestId(0), 3, (LAST_TOKEN,), blocks, SampleSpec(GREEDY))
    assert worker.run(Step(StepId(2), (ahead, mate))).tokens[1:] == alone
