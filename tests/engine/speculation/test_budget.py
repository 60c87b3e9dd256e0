import pytest

from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.iteration import Iteration
from engine.request import Request, RequestSpec, Times
from engine.speculation.budget import FIRST_STEPS, MAX_STEPS, SHARE, WARM_UPS, SpeculationBudget
from engine.speculation.drafter import Drafter
from engine.speculation.proposers import Proposal
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId, StepResult

STEP = 0.01  # seconds of a decode without drafts
CHEAP = CostModel.linear(per_step=STEP, per_token=0.0, per_slot=0.0)


def a_step(number: int, num_drafts: int = 0) -> Iteration:
    request = Request(
        RequestId(0), RequestSpec((1,), 999, SamplingParams()), Times(0.0), output=[7]
    )
    tokens, sample = (7,) * (1 + num_drafts), SampleSpec(SamplingParams())
    entry = StepEntry(request.request_id, 1, tokens, b"", sample, num_drafts=num_drafts)
    return Iteration(Step(StepId(number), (entry,)), (request,))


def after_warm_up(seconds: float, num_accepted: int) -> SpeculationBudget:
    """The budget after one counted iteration of 4 drafts that took `seconds`."""
    budget, now = SpeculationBudget(LiveCost(CHEAP)), 0.0
    budget.iteration_took(a_step(0), 0.0, now)
    for number in range(WARM_UPS + 1):
        now += seconds
        budget.drafts_took(a_step(number, 4), seconds, now, num_accepted)
    return budget


def test_drafts_that_save_time_pay_in_and_those_that_lose_it_take_out() -> None:
    first = FIRST_STEPS * STEP
    one = after_warm_up(1.5 * STEP, 2).seconds
    assert one == pytest.approx(first + (WARM_UPS + 1) * 1.5 * STEP * (1 + SHARE))
    assert after_warm_up(1.5 * STEP, 0).seconds == pytest.approx(first + STEP * (4.5 * SHARE - 0.5))
    assert after_warm_up(90 * STEP, 0).seconds > first - STEP * 1.01, "a stall is no loss"


def test_what_the_first_iterations_of_a_size_lose_is_not_counted() -> None:
    budget = SpeculationBudget(LiveCost(CHEAP))
    for number in range(WARM_UPS):
        budget.drafts_took(a_step(number, 4), 3 * STEP, 3 * STEP * (number + 1), 0)
    first = FIRST_STEPS * STEP
    assert budget.seconds == pytest.approx(first + WARM_UPS * SHARE * 3 * STEP)


def test_the_budget_never_exceeds_its_most() -> None:
    budget = SpeculationBudget(LiveCost(CHEAP))
    for number in range(100):
        budget.drafts_took(a_step(number, 4), STEP, STEP * number, 4)
    assert budget.seconds == pytest.approx(MAX_STEPS * STEP)


def test_what_asking_took_is_taken_out_unless_the_iteration_has_drafts() -> None:
    now = 0.0
    budget = SpeculationBudget(LiveCost(CHEAP), lambda: now)
    first = budget.seconds
    for is_free, seconds in ((True, 0.0), (False, 0.003)):
        budget.begin_asking()
        budget.ask()
        now += 0.003
        budget.end_asking(is_free=is_free)
        assert budget.seconds == pytest.approx(first - seconds)


def test_the_gap_of_drafts_is_told_from_the_seconds_of_each() -> None:
    budget, now = SpeculationBudget(LiveCost(CHEAP)), 0.0
    for number in range(600):
        num_drafts = 1 + number % 16
        now += STEP + 0.2 * STEP + 0.01 * STEP * num_drafts
        budget.drafts_took(a_step(number, num_drafts), STEP, now, 0)
    assert budget.draft_gap == pytest.approx(0.2 * STEP, rel=0.05)
    assert budget.draft_seconds == pytest.approx(0.01 * STEP, rel=0.05)


def test_the_wait_of_an_iteration_that_was_not_planned_ahead_is_taken_out() -> None:
    budget = SpeculationBudget(LiveCost(CHEAP))
    budget.wait_for = StepId(1)
    budget.draft_gap = 0.7 * STEP
    first, now = budget.seconds, 0.0
    for number in range(4):
        now += STEP * (1.5 if number == 2 else 1.0)
        budget.iteration_took(a_step(number), STEP, now)
    assert budget.seconds == pytest.approx(first + 4 * SHARE * STEP - 0.5 * STEP)


class Wrong:
    """Proposes tokens that are never right, and says that they match well."""

    name = "wrong"

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, request: Request, count: int) -> Proposal:
        self.num_asked += 1
        return Proposal((9,) * count, 16)

    def forget(self, request: Request) -> None:
        """Keeps nothing."""


@pytest.mark.parametrize("slowdown", [1.5, 3.0])
def test_wrong_drafts_that_the_cost_model_calls_free_lose_little(slowdown: float) -> None:
    """The model says that drafts are free; as measured, an iteration with them is slower."""
    drafter, now, lost, count = Drafter([Wrong()], 4, LiveCost(CHEAP)), 0.0, 0.0, 5_000
    request = a_step(0).requests[0]
    for number in range(count):
        found: dict[int, tuple[int, ...]] = {}
        if drafter.is_active:
            entry = a_step(number).step.entries[0]
            found = drafter.choose([(request, entry)], 100)
        iteration = a_step(number, len(found.get(0, ())))
        drafter.sent(iteration.step.step_id)
        seconds = STEP * (slowdown if found else 1.0)
        lost += seconds - STEP
        now += seconds
        if found:
            drafter.returned(request, len(found[0]), 0)
        request.output.append(7)
        drafter.iteration_took(iteration, StepResult(StepId(number), (7,), seconds), now)
    assert 0.0 < lost < 2 * SHARE * count * STEP + (FIRST_STEPS + 2 + 4 * WARM_UPS * 2) * STEP


def test_an_inactive_drafter_is_asked_again_when_the_budget_allows() -> None:
    proposer = Wrong()
    drafter = Drafter([proposer], 4, LiveCost(CHEAP))
    drafter.budget.seconds = -0.5 * SHARE * 100 * STEP
    num_asked = []
    for number in range(100):
        iteration = a_step(number)
        if drafter.is_active:
            drafter.choose([(iteration.requests[0], iteration.step.entries[0])], 100)
        drafter.sent(iteration.step.step_id)
        result = StepResult(StepId(number), (7,), STEP)
        drafter.iteration_took(iteration, result, STEP * number)
        num_asked.append(proposer.num_asked)
    assert num_asked[40] == 0
    assert num_asked[-1] > 0
