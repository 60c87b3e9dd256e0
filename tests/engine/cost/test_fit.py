from dataclasses import replace
from random import Random

import pytest

from engine.cost.fit import Sample, fit
from engine.cost.model import CostModel
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId

TRUE = CostModel(
    curve=((1, 0.002), (64, 0.010), (512, 0.150)),
    per_slot=2e-7,
    per_pair=3e-8,
    per_draw=5e-5,
    per_piece=1e-3,
)


def a_step(random: Random) -> Step:
    """Decodes, and in one step of three a chunk of a prompt."""
    sample = SampleSpec(SamplingParams())
    entries = [
        StepEntry(RequestId(number), random.randint(1, 4000), (1,), b"", sample)
        for number in range(random.choice([1, 2, 4, 8, 16, 64]))
    ]
    if random.random() < 0.33:
        last = random.choice([sample, None])
        start, size = random.choice([0, 512, 1024]), random.choice([64, 200, 448])
        entries.append(StepEntry(RequestId(99), start, (1,) * size, b"", last))
    return Step(StepId(0), tuple(entries))


def samples(count: int, spread: float) -> list[Sample]:
    random = Random(7)
    steps = [a_step(random) for _ in range(count)]
    noises = [random.uniform(1.0 - spread, 1.0 + spread) for _ in steps]
    return [
        Sample.of(step, TRUE.step(step) * noise) for step, noise in zip(steps, noises, strict=True)
    ]


@pytest.mark.parametrize(("spread", "tolerance"), [(0.0, 0.02), (0.4, 0.06)])
def test_a_model_is_recovered_from_its_steps(spread: float, tolerance: float) -> None:
    found = fit(samples(1500, spread))
    random = Random(8)
    for step in (a_step(random) for _ in range(50)):
        assert found.step(step) == pytest.approx(TRUE.step(step), rel=tolerance)


def test_steps_that_were_padded_to_graphs_are_recovered_as_such() -> None:
    true, random = replace(TRUE, graphs=(128, 256, 512)), Random(3)
    steps = [a_step(random) for _ in range(1500)]
    found = fit([Sample.of(step, true.step(step)) for step in steps], graphs=true.graphs)
    assert found.graphs == true.graphs
    for step in (a_step(random) for _ in range(50)):
        assert found.step(step) == pytest.approx(true.step(step), rel=0.02)
        assert Sample.of(step, 1.0).predicted(found) == pytest.approx(found.step(step))


def test_steps_with_stalls_take_as_long_together_as_predicted() -> None:
    """The mean is fitted, not the median: a queue grows by the seconds of stalls too."""
    random, steps = Random(9), samples(3000, 0.1)
    stalled = [
        s._replace(seconds=s.seconds * (6.0 if random.random() < 0.03 else 1.0)) for s in steps
    ]
    found = fit(stalled)
    predicted = sum(sample.predicted(found) for sample in stalled)
    assert predicted == pytest.approx(sum(sample.seconds for sample in stalled), rel=0.02)
    assert predicted > 1.1 * sum(sample.predicted(TRUE) for sample in steps)


def test_no_coefficient_is_negative() -> None:
    """Longer contexts were faster by chance: the coefficient is 0, not negative."""
    odd = [Sample(1, 1000, 0.0, 1, 0.001), Sample(1, 1, 0.0, 1, 0.002), Sample(9, 9, 45, 1, 0.001)]
    found = fit(odd * 5)
    assert min(found.per_slot, found.per_pair, found.per_draw) >= 0.0
    assert [seconds for _, seconds in found.curve] == sorted(s for _, s in found.curve)


def test_steps_of_one_size_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="two different numbers of tokens"):
        fit([Sample(1, 5, 0.0, 1, 0.01)] * 10)


def test_of_many_samples_an_evenly_spaced_subset_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cost.fit.MAX_SAMPLES", 100)
    assert fit(samples(1500, 0.0)).tokens(64) == pytest.approx(TRUE.tokens(64), rel=0.1)


def test_few_short_steps_do_not_make_a_long_prompt_take_minutes() -> None:
    """What a slow start measured of a model of 0.5B parameters, on a machine with other work."""
    found = fit(
        [
            Sample(1, 1, 0.0, 1, 0.134),
            Sample(4, 4, 10.0, 1, 0.158, 1),
            Sample(16, 16, 136.0, 1, 0.226, 1),
            Sample(4, 68, 0.0, 4, 0.184),
            Sample(1, 1025, 0.0, 1, 0.160),
        ]
    )
    assert 0.5 < found.compute(256, 0) < 3.0  # 0.7 s without other work
    assert found.compute(1, 0) == pytest.approx(0.134, rel=0.2)
