from collections import Counter
from random import Random

import numpy as np
import pytest
import torch

from engine.control.scheduler import IterationScheduler
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import RequestSpec
from engine.step import (
    OUTPUT_KEPT_STEPS,
    Grammar,
    GrammarKind,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
    StepResult,
)
from engine.transport.wire import RunStep, frame
from engine.worker.sampling.logits_processors import invalid_id_fields, process
from engine.worker.sampling.outputs import OutputMemory
from engine.worker.sampling.token_counts import (
    CountedTokens,
    PenaltyCounts,
    output_counts,
    whole_counts,
)
from tests.scheduling import a_scheduler, a_spec, planned

PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.2)
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
CONTINUES = SampleSpec(PENALISED, continues=True)


def run(memory: OutputMemory, step_id: int, start: int, token: int, spec: SampleSpec) -> SampleSpec:
    """A step with one decode of request 0; its completed spec."""
    entry = StepEntry(RequestId(0), start, (token,), b"", spec)
    (found,) = memory.complete(Step(StepId(step_id), (entry,))).entries
    assert found.sample is not None
    return found.sample


def a_memory() -> OutputMemory:
    """Of request 0 with prompt (1, 2) and output (7,), as of step 0."""
    memory = OutputMemory()
    first = SampleSpec(PENALISED, prompt=(1, 2), output=(7,), grammar=SCHEMA)
    assert run(memory, 0, 2, 7, first) == first
    return memory


def test_each_step_appends_its_token_to_the_remembered_output() -> None:
    memory = a_memory()
    for step_id, token in ((1, 8), (2, 9)):
        found = run(memory, step_id, 2 + step_id, token, CONTINUES)
    assert (found.prompt, found.output, found.grammar) == ((1, 2), (7, 8, 9), SCHEMA)


def test_an_entry_at_an_earlier_position_replaces_the_tokens_after_it() -> None:
    memory = a_memory()
    run(memory, 1, 3, 8, CONTINUES)
    assert run(memory, 2, 3, 5, CONTINUES).output == (7, 5)


def test_an_output_sent_again_replaces_the_remembered_one() -> None:
    memory = a_memory()
    run(memory, 1, 3, 8, SampleSpec(PENALISED, output=(4, 8)))
    assert run(memory, 2, 4, 9, CONTINUES).output == (4, 8, 9)


@pytest.mark.parametrize("start", [1, 4])
def test_an_entry_that_does_not_follow_the_remembered_output_is_rejected(start: int) -> None:
    with pytest.raises(ValueError, match="request 0: its output is not on this worker"):
        run(a_memory(), 1, start, 8, CONTINUES)


@pytest.mark.parametrize("has_output", [False, True])
def test_a_step_planned_ahead_of_a_failed_one_fails_no_other_request(has_output: bool) -> None:
    """The failed step opened and never completed; its request has failed with it."""
    memory = a_memory() if has_output else OutputMemory()
    spec = CONTINUES if has_output else SampleSpec(PENALISED, output=(7,))
    memory.open(Step(StepId(1), (StepEntry(RequestId(0), 3, (8,), b"", spec),)))
    other = StepEntry(RequestId(1), 2, (5,), b"", SampleSpec(PENALISED, output=(5,)))
    ahead = Step(StepId(2), (StepEntry(RequestId(0), 4, (9,), b"", CONTINUES), other))
    memory.open(ahead)
    failed, found = memory.complete(ahead).entries
    assert failed.sample is not None
    assert failed.sample.grammar is None
    assert found.sample is not None
    assert found.sample.output == (5,)


def test_an_output_is_forgotten_after_the_steps_that_the_scheduler_counts_on() -> None:
    assert run(a_memory(), OUTPUT_KEPT_STEPS, 3, 8, CONTINUES).output == (7, 8)
    memory = a_memory()
    memory.complete(Step(StepId(OUTPUT_KEPT_STEPS + 1), ()))
    assert len(memory) == 0


def decode(scheduler: IterationScheduler) -> Step:
    """Run one iteration in which every request samples token 5."""
    iteration = planned(scheduler)
    samples = sum(entry.sample is not None for entry in iteration.step.entries)
    result = StepResult(iteration.step.step_id, (5,) * samples, 0.1)
    scheduler.commit(iteration, result, 0.0)
    return iteration.step


@pytest.mark.parametrize(
    "fields", [{"sampling": PENALISED}, {"grammar": SCHEMA}], ids=["penalty", "grammar"]
)
def test_the_bytes_of_a_step_do_not_grow_with_the_output(fields: dict[str, object]) -> None:
    spec = {"sampling": SamplingParams(temperature=0.0)} | fields
    scheduler = a_scheduler(FirstComeFirstServed(), num_blocks=600)
    scheduler.add(RequestSpec((1,) * 8, 400, **spec), 0.0)  # type: ignore[arg-type]
    steps = [decode(scheduler) for _ in range(400)]
    num_tokens = [
        len(entry.sample.prompt) + len(entry.sample.output)
        for step in steps
        for entry in step.entries
        if entry.sample is not None
    ]
    assert sum(num_tokens) <= 8  # the prompt, once
    sizes = [len(frame(RunStep(step))) - len(step.entries[0].blocks) for step in steps]
    assert sizes[-1] <= sizes[1] + 8  # positions and ids take more digits


def test_a_request_that_long_did_not_run_sends_its_output_again() -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_size=1)
    request = scheduler.add(RequestSpec((1, 2), 9, PENALISED), 0.0)
    for step_id, sends in ((1, False), (OUTPUT_KEPT_STEPS + 1, False), (999, True)):
        decode(scheduler)
        scheduler._next_step_id = step_id
        (entry,) = decode(scheduler).entries
        assert entry.sample is not None
        assert entry.sample.continues is not sends
        assert entry.sample.output == (tuple(request.output[:-1]) if sends else ())
        scheduler._next_step_id = step_id + 1


@pytest.mark.parametrize(
    "fields", [{"sampling": PENALISED}, {"grammar": SCHEMA}], ids=["penalty", "grammar"]
)
def test_steps_of_one_request_share_what_is_the_same_for_all_its_tokens(
    fields: dict[str, object],
) -> None:
    spec = {"sampling": SamplingParams(temperature=0.0)} | fields
    scheduler = a_scheduler(FirstComeFirstServed(), num_blocks=600)
    scheduler.add(RequestSpec((1,) * 8, 40, **spec), 0.0)  # type: ignore[arg-type]
    samples = [decode(scheduler).entries[0].sample for _ in range(40)]
    same = [sample for sample in samples if sample is samples[5]]
    others = [sample for sample in samples if sample is not samples[5]]
    assert len(same) >= 35
    assert all(sample.may_be_late or not sample.continues for sample in others if sample)


def test_without_a_penalty_nothing_is_remembered() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    scheduler.add(a_spec(2, 5), 0.0)
    memory = OutputMemory()
    for _ in range(5):
        step = decode(scheduler)
        assert memory.complete(step) is step
    assert len(memory) == 0


def test_ids_are_counted_as_the_output_grows_and_is_cut() -> None:
    """As if they were counted anew; a step may continue behind some of the drafts only."""
    random, memory = Random(3), OutputMemory()
    prompt = tuple(random.randrange(20) for _ in range(9))
    sampling = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)
    first = SampleSpec(sampling, prompt=prompt, output=(7,))
    entry = StepEntry(RequestId(0), 9, (7,), b"", first)
    length = 1
    for step_id in range(300):
        (found,) = memory.complete(Step(StepId(step_id), (entry,))).entries
        spec = found.sample
        assert spec is not None
        assert isinstance(spec.output, CountedTokens)
        by_id = dict(zip(*map(np.ndarray.tolist, output_counts(spec.output).distinct), strict=True))
        assert by_id == Counter(spec.output)
        whole = whole_counts((), spec.output)
        by_id = dict(zip(*map(np.ndarray.tolist, whole.distinct), strict=True))
        assert by_id == Counter(prompt + spec.output)
        lowest, highest = whole.extremes  # of all that were ever counted
        assert 0 <= lowest <= min(prompt + spec.output)
        assert max(prompt + spec.output) <= highest < 40
        length = max(1, len(spec.output) + random.choice([-1, 0, 0, 0, entry.num_drafts]))
        num_drafts = random.randrange(4)
        tokens = tuple(random.randrange(40) for _ in range(1 + num_drafts))
        spec = SampleSpec(sampling, continues=True)
        entry = StepEntry(RequestId(0), 9 + length, tokens, b"", spec, num_drafts=num_drafts)


def test_counted_outputs_are_processed_as_others() -> None:
    specs = [
        SampleSpec(SamplingParams(repetition_penalty=1.2), prompt=(1, 2, 2), output=(3, 5, 3)),
        SampleSpec(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), output=(4, 4, 0)),
        SampleSpec(SamplingParams(frequency_penalty=-1.0), output=()),
    ]
    counted = []
    for spec in specs:
        counts = PenaltyCounts(spec.prompt, counts_prompt=spec.sampling.repetition_penalty != 1.0)
        counts.follow(spec.output[:1], 0)
        counted.append(spec._replace(output=counts.follow(spec.output, 1)))
    logits = np.linspace(-2.0, 2.0, 24, dtype=np.float32).reshape(3, 8)
    expected, found = logits.copy(), logits.copy()
    process(torch.from_numpy(expected), [0, 1, 2], specs, torch.from_numpy)
    process(torch.from_numpy(found), [0, 1, 2], counted, torch.from_numpy)
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, logits)
    assert invalid_id_fields(counted, 5) == {0: "output"} == invalid_id_fields(specs, 5)
    assert invalid_id_fields(counted, 2) == invalid_id_fields(specs, 2)
