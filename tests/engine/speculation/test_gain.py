from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.speculation.budget import SpeculationBudget
from engine.speculation.gain import DraftGain, Guess
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId

MODEL = CostModel(((0, 0.016), (64, 0.048)), per_slot=0.0, per_pair=0.0)
COUNT = 32  # decodes, with a draft each


def a_step(num_drafts: int) -> Step:
    spec, tokens = SampleSpec(SamplingParams(temperature=0.0)), (1,) * (1 + num_drafts)
    entry = StepEntry(RequestId(1), 8, tokens, b"", spec, num_drafts=num_drafts)
    return Step(StepId(1), (entry,) * COUNT)


def test_steps_with_drafts_that_are_slower_than_predicted_do_not_make_decodes_look_slower() -> None:
    cost = LiveCost(MODEL)
    gain = DraftGain(cost, SpeculationBudget(cost))
    guesses = [Guess(place, [0.9]) for place in range(COUNT)]
    assert len(gain.counts(guesses, [8] * COUNT, COUNT)) == COUNT
    for _ in range(200):
        cost.observe(a_step(0), MODEL.step(a_step(0)))
        for _ in range(8):
            cost.observe(a_step(1), 1.5 * MODEL.step(a_step(1)))
    assert gain.counts(guesses, [8] * COUNT, COUNT) == {}
