import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest
import torch

from engine.grammar import GrammarError, Mask
from engine.step import (
    Grammar,
    GrammarKind,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
)
from engine.worker.model.torch_operators import TorchSampling
from engine.worker.sampling.constraints import (
    COMPILE_THREADS,
    MASK_WAIT_SECONDS_ALONE,
    MAX_MATCHERS,
    Constraints,
    MaskRequest,
)
from engine.worker.sampling.mask_threads import MASK_THREADS, MASK_WAIT_SECONDS
from engine.worker.sampling.sampler import Masks, RowFault, Sampler, permitted

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 16


class Count:
    """Allows the ids from 0 to the number of tokens seen; fails at `bad` tokens, ends at 5."""

    def __init__(self, owner: "Counting", seen: tuple[int, ...] = ()) -> None:
        self.owner = owner
        self.seen = seen

    def feed(self, tokens: Sequence[int]) -> None:
        self.owner.num_fed += len(tokens)
        self.owner.most_fed = max(self.owner.most_fed, len(tokens))
        self.owner.note_thread()
        self.seen += tuple(tokens)
        if 13 in self.seen:
            raise GrammarError("unlucky")

    def mask(self) -> Mask:
        self.owner.note_thread()
        if 12 in self.seen:
            self.owner.mask_gate.wait()
        bits = np.packbits(np.arange(VOCAB) <= len(self.seen), bitorder="little").tobytes()
        return Mask(bits, accepts=len(self.seen) >= 5)

    def copy(self) -> "Count":
        return Count(self.owner, self.seen)


class Counting:
    """A compiler whose grammars count; text "slow" waits for the gate, "bad" is none."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.mask_gate = threading.Event()  # for the masks after token 12
        self.compiled: list[str] = []
        self.num_opened = 0
        self.num_fed = 0
        self.most_fed = 0  # tokens at once
        self.threads: list[str] = []  # that read outputs and computed masks, without their numbers

    def note_thread(self) -> None:
        self.threads.append(threading.current_thread().name.rpartition("_")[0])

    def open(self) -> "Counting":
        self.num_opened += 1
        return self

    def compile(self, grammar: Grammar) -> Count:
        if grammar.text.startswith("slow"):
            self.gate.wait()
        self.compiled.append(grammar.text)
        if grammar.text == "bad":
            raise GrammarError("no such thing")
        return Count(self)


def an_entry(
    request: int, text: str | None, output: tuple[int, ...] = (), *, may_be_late: bool = False
) -> StepEntry:
    grammar = None if text is None else Grammar(GrammarKind.REGEX, text)
    spec = SampleSpec(GREEDY, output=output, grammar=grammar, may_be_late=may_be_late)
    return StepEntry(RequestId(request), 0, (1,), bytes(4), spec)


def masks_of(constraints: Constraints, *entries: StepEntry) -> Masks:
    return constraints.collect(constraints.begin(Step(StepId(0), entries)))


def sizes(masks: Masks) -> dict[int, int]:
    """How many ids each row allows."""
    return {row: sum(map(int.bit_count, mask.bits)) for row, mask in masks.allowed.items()}


def test_each_row_has_the_mask_of_its_own_output() -> None:
    constraints = Constraints(Counting().open)
    entries = an_entry(0, "a"), an_entry(1, None), an_entry(2, "a", (3, 4)), an_entry(3, "b", (1,))
    found = masks_of(constraints, *entries)
    assert sizes(found) == {0: 1, 2: 3, 3: 2}
    assert not found.faults
    assert not found.late


def test_a_matcher_is_cached_and_a_grammar_compiled_once() -> None:
    compiler = Counting()
    constraints = Constraints(compiler.open)
    for length in range(6):
        output = tuple(range(length))
        assert sizes(masks_of(constraints, an_entry(0, "a", output))) == {0: length + 1}
    assert (compiler.num_opened, compiler.compiled, compiler.num_fed) == (1, ["a"], 5)


def test_a_matcher_of_another_output_or_grammar_is_made_again() -> None:
    constraints = Constraints(Counting().open)
    for text, output in (("a", (1, 2, 3)), ("a", (1, 4)), ("b", (1, 4, 5)), ("b", ())):
        assert sizes(masks_of(constraints, an_entry(0, text, output))) == {0: len(output) + 1}


def test_matchers_are_bounded_and_an_evicted_one_is_made_again() -> None:
    compiler = Counting()
    constraints = Constraints(compiler.open)
    for request in range(MAX_MATCHERS + 1):
        masks_of(constraints, an_entry(request, "a", (1, 2)))
    fed = compiler.num_fed
    assert sizes(masks_of(constraints, an_entry(0, "a", (1, 2, 3)))) == {0: 4}
    assert compiler.num_fed == fed + 3
    assert sizes(masks_of(constraints, an_entry(MAX_MATCHERS, "a", (1, 2, 3)))) == {0: 4}
    assert compiler.num_fed == fed + 4


def test_a_grammar_being_compiled_makes_only_its_own_row_late() -> None:
    compiler = Counting()
    constraints = Constraints(compiler.open)
    masks_of(constraints, an_entry(1, "a"))
    late = an_entry(0, "slow", may_be_late=True)
    found = masks_of(constraints, late, an_entry(1, "a", (1,)), an_entry(2, None))
    assert (sizes(found), found.late) == ({1: 2}, frozenset({0}))
    compiler.gate.set()
    found = masks_of(constraints, an_entry(0, "slow", may_be_late=False))
    assert (sizes(found), found.late) == ({0: 1}, frozenset())


def test_a_grammar_does_not_wait_for_those_that_are_being_compiled() -> None:
    compiler = Counting()
    constraints = Constraints(compiler.open)
    slow = [
        an_entry(number, "slow" + " " * number, may_be_late=True)
        for number in range(COMPILE_THREADS - 1)
    ]
    found = masks_of(constraints, *slow, an_entry(9, "a"))
    assert (sizes(found), found.late) == ({len(slow): 1}, frozenset(range(len(slow))))
    compiler.gate.set()


def test_a_row_that_may_not_be_late_is_waited_for() -> None:
    compiler = Counting()
    constraints = Constraints(compiler.open)
    wanted = constraints.begin(Step(StepId(0), (an_entry(0, "slow", may_be_late=False),)))
    threading.Timer(0.15, compiler.gate.set).start()
    assert sizes(constraints.collect(wanted)) == {0: 1}


def test_a_row_with_a_slow_mask_is_late_and_delays_no_other_row() -> None:
    compiler = Counting()
    constraints = Constraints(compiler.open)
    masks_of(constraints, an_entry(0, "a"), an_entry(1, "a"))
    for length in range(1, 4):
        other = an_entry(1, "a", (1,) * length)
        late = an_entry(0, "a", (12,), may_be_late=True)
        found = masks_of(constraints, late, other, an_entry(2, None))
        assert (sizes(found), found.late) == ({1: length + 1}, frozenset({0}))
    fed = compiler.num_fed
    compiler.mask_gate.set()
    assert sizes(masks_of(constraints, an_entry(0, "a", (12,), may_be_late=False))) == {0: 2}
    assert compiler.num_fed == fed  # the mask that was being computed is used


def test_a_slow_mask_of_an_output_that_was_reset_is_not_used() -> None:
    compiler = Counting()
    constraints = Constraints(compiler.open)
    masks_of(constraints, an_entry(0, "a"))
    late = an_entry(0, "a", (12,), may_be_late=True)
    assert masks_of(constraints, late, an_entry(1, None)).late == {0}
    assert sizes(masks_of(constraints, an_entry(0, "a", (3, 4)))) == {0: 3}
    compiler.mask_gate.set()
    assert sizes(masks_of(constraints, an_entry(0, "a", (3, 4, 5)))) == {0: 4}


@pytest.mark.parametrize("text", ["a", "slow"])
def test_a_row_that_was_late_once_is_not_waited_for_beside_other_rows(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mask, or its grammar, is pending; the batch has other rows."""
    waits: list[float | None] = []

    def recorded(futures: list[Future[Any]], seconds: float | None = None, *more: Any) -> Any:
        waits.extend(seconds for future in futures if not future.done())
        return wait(futures, seconds, *more)

    compiler = Counting()
    constraints = Constraints(compiler.open)
    late = an_entry(0, text, (12,), may_be_late=True)
    assert masks_of(constraints, late, an_entry(1, None)).late == {0}
    monkeypatch.setattr("engine.worker.sampling.constraints.wait", recorded)
    assert masks_of(constraints, late, an_entry(1, None)).late == {0}
    assert waits == [0.0]
    assert masks_of(constraints, late).late == {0}  # alone, it is waited for
    assert waits[-2:] == [MASK_WAIT_SECONDS_ALONE, 0.0]
    compiler.gate.set()
    compiler.mask_gate.set()


def test_late_rows_are_waited_for_for_a_share_of_the_time_of_the_step() -> None:
    now = time.perf_counter()
    short, long = (MaskRequest(begun_at=now - age).wait_seconds for age in (0.004, 10.0))
    assert 0.001 <= short < long == MASK_WAIT_SECONDS


def test_outputs_are_read_token_by_token() -> None:
    """Between two tokens other threads can take the interpreter's lock."""
    compiler = Counting()
    masks_of(Constraints(compiler.open), an_entry(0, "a", (3, 4, 5)))
    assert (compiler.num_fed, compiler.most_fed) == (3, 1)


def make_all_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask takes longer than a batch waits for it, before the first step and behind it."""
    for module in ("constraints", "mask_threads"):
        monkeypatch.setattr(f"engine.worker.sampling.{module}.MASK_WAIT_SECONDS", 0.0)


def test_outputs_of_slow_rows_are_read_in_another_thread_than_their_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That thread has ordinary priority; it rests if other rows of the batch have tokens."""
    make_all_slow(monkeypatch)
    rests: list[float] = []
    monkeypatch.setattr("engine.worker.sampling.mask_threads.time.sleep", rests.append)
    compiler = Counting()
    constraints = Constraints(compiler.open)
    for length in range(4):
        alone = length < 2
        others = () if alone else (an_entry(1, None),)
        masks_of(constraints, an_entry(0, "a", (1,) * length), *others)
        assert compiler.threads == (["mask"] if not length else ["slow output", "slow mask"])
        compiler.threads.clear()
    assert len(rests) == 2


def test_slow_rows_do_not_occupy_the_threads_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More slow rows than mask threads: after each was slow once, they share one thread."""
    make_all_slow(monkeypatch)
    compiler = Counting()
    constraints = Constraints(compiler.open)
    compiler.mask_gate.set()
    slow = [an_entry(request, "a", (12,)) for request in range(MASK_THREADS + 1)]
    for entry in slow:
        masks_of(constraints, entry)
    compiler.mask_gate.clear()
    slow = [
        an_entry(request, "a", (12, 1), may_be_late=True) for request in range(MASK_THREADS + 1)
    ]
    found = masks_of(constraints, *slow, an_entry(9, None))
    assert found.late == set(range(MASK_THREADS + 1))
    assert sizes(masks_of(constraints, an_entry(7, "a", may_be_late=False))) == {0: 1}
    compiler.mask_gate.set()


@pytest.mark.parametrize("may_be_late", [True, False])
def test_a_row_whose_mask_takes_too_long_fails_and_says_why(
    may_be_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.sampling.constraints.MASK_SECONDS", 0.05)
    compiler = Counting()
    constraints = Constraints(compiler.open)
    masks_of(constraints, an_entry(0, "a"))
    entry = an_entry(0, "a", (12,), may_be_late=may_be_late)
    found = masks_of(constraints, entry)
    while found.late:
        found = masks_of(constraints, entry)
    (fault,) = found.faults.values()
    assert str(fault) == "grammar: the allowed tokens cannot be computed within 0.05 s"
    assert fault.is_caller_error
    compiler.mask_gate.set()


def test_an_invalid_grammar_or_output_is_a_fault_of_its_row() -> None:
    constraints = Constraints(Counting().open)
    entries = an_entry(0, "bad"), an_entry(1, "a", (13,)), an_entry(2, "a")
    for _ in range(2):
        found = masks_of(constraints, *entries)
        assert {row: str(fault) for row, fault in found.faults.items()} == {
            0: "grammar: no such thing",
            1: "grammar: unlucky",
        }
        assert all(fault.is_caller_error for fault in found.faults.values())
        assert sizes(found) == {2: 1}


def mask(*ids: int, accepts: bool = False) -> Mask:
    bits = np.packbits(np.isin(np.arange(VOCAB), ids), bitorder="little").tobytes()
    return Mask(bits, accepts)


@pytest.mark.parametrize(
    ("allowed", "spec", "left"),
    [
        (mask(1, 2), SampleSpec(GREEDY, end_ids=(9,)), {1, 2}),
        (mask(1, 2, accepts=True), SampleSpec(GREEDY, end_ids=(9,)), {1, 2, 9}),
        (mask(1, 9), SampleSpec(GREEDY, end_ids=(8, 9)), {1, 9}),
        (mask(1, 2, accepts=True), SampleSpec(GREEDY, end_ids=(9,), banned=(9,)), {1, 2}),
        (mask(accepts=True), SampleSpec(GREEDY, end_ids=(8, 9), banned=(8, 9)), {8, 9}),
        (mask(accepts=True), SampleSpec(GREEDY, end_ids=(8, 9), banned=(9,)), {8}),
        (mask(9, accepts=True), SampleSpec(GREEDY, end_ids=(9,), banned=(9,)), {9}),
    ],
)
def test_end_tokens_are_allowed_when_the_grammar_accepts(
    allowed: Mask, spec: SampleSpec, left: set[int]
) -> None:
    grammar = Grammar(GrammarKind.REGEX, "x")
    found = set()
    for token in range(VOCAB):
        bias = ((token, 50.0),)
        wish = spec._replace(
            sampling=SamplingParams(temperature=0.0, logit_bias=bias), grammar=grammar
        )
        sampler = Sampler(VOCAB, TorchSampling())
        sampled = sampler.sample(torch.zeros(1, VOCAB), [wish], [0], Masks({0: allowed}))
        assert not sampled.faults
        found.add(sampled.tokens[0])
    assert found == left


def test_a_grammar_that_allows_no_token_is_a_fault() -> None:
    with pytest.raises(RowFault, match="allows no token"):
        permitted(mask(), SampleSpec(GREEDY, end_ids=(9,)), VOCAB)


def test_late_rows_sample_nothing_and_change_no_other_row() -> None:
    sampler = Sampler(VOCAB, TorchSampling())
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    grammar = Grammar(GrammarKind.REGEX, "x")
    specs = [
        SampleSpec(SamplingParams(seed=1)),
        SampleSpec(SamplingParams(seed=2), grammar=grammar),
        SampleSpec(SamplingParams(seed=3)),
    ]
    alone = sampler.sample(logits[[0, 2]], [specs[0], specs[2]], [4, 4])
    sampled = sampler.sample(logits.clone(), specs, [4] * 3, Masks(late=frozenset({1})))
    assert sampled.tokens[::2] == alone.tokens
    assert not sampled.faults
