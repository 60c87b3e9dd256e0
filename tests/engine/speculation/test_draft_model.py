from math import inf

import pytest

from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.iteration import Iteration
from engine.request import Request, RequestSpec, State, Times
from engine.speculation.budget import DRAFT_SECONDS
from engine.speculation.draft_model import (
    FIRST_PROBES,
    PLAN_SHARE,
    Candidate,
    DraftModelProposer,
)
from engine.speculation.drafter import Drafter
from engine.step import (
    ProposalSpec,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
    StepResult,
)

CHEAP_ROWS = CostModel.linear(per_step=1.0, per_token=0.01, per_slot=0.0)
DEAR_ROWS = CostModel.linear(per_step=0.0, per_token=1.0, per_slot=0.0)


def a_request(prompt_len: int = 8, produced: int = 1, number: int = 0) -> Request:
    spec = RequestSpec(tuple(range(prompt_len)), 500, SamplingParams())
    request = Request(RequestId(number), spec, Times(0.0), output=[7] * produced)
    request.state = State.RUNNING
    request.num_computed = request.num_tokens - 1
    return request


def a_decode(request: Request) -> tuple[Request, StepEntry]:
    start = request.num_tokens - 1
    tokens = (request.output[-1],)
    return request, StepEntry(request.request_id, start, tokens, b"", SampleSpec(SamplingParams()))


def a_drafter(model: CostModel, size_ratio: float = 0.05) -> Drafter:
    cost = LiveCost(model)
    return Drafter([], 4, cost, DraftModelProposer(cost, size_ratio))


def returns(
    drafter: Drafter, request: Request, spec: ProposalSpec, tokens: tuple[int, ...]
) -> None:
    """An iteration with this spec samples token 7, and proposes `tokens`."""
    request, entry = a_decode(request)
    request.num_computed = entry.start + 1
    request.output.append(7)
    iteration = Iteration(Step(StepId(0), (entry._replace(proposal=spec),)), (request,))
    result = StepResult(StepId(0), (7,), 0.1, proposals=(tokens,), proposal_seconds=0.05)
    drafter.will_propose(request, spec)
    assert drafter.waiting(iteration, {request}) == ({request} if spec.num_tokens else set())
    drafter.iteration_took(iteration, result, 0.0)


def test_it_computes_what_it_lacks_and_proposes_tokens() -> None:
    request = a_request()
    found = a_drafter(CHEAP_ROWS).proposals([a_decode(request)], 100)
    assert found[0].start == 0
    assert found[0].tokens == request.spec.prompt
    assert 1 <= found[0].num_tokens <= 4


def test_its_proposals_are_the_drafts_of_the_next_iteration() -> None:
    drafter, request = a_drafter(CHEAP_ROWS), a_request()
    spec = drafter.proposals([a_decode(request)], 100)[0]
    returns(drafter, request, spec, (7, 8))
    assert request.num_drafted == request.num_computed
    assert drafter.choose([a_decode(request)], 100) == {0: (7, 8)}
    assert drafter.proposals([a_decode(request)], 100)[0].tokens == ()


def test_an_output_that_leaves_the_proposal_has_no_drafts() -> None:
    drafter, request = a_drafter(CHEAP_ROWS), a_request()
    returns(drafter, request, drafter.proposals([a_decode(request)], 100)[0], (8, 9))
    request.output.append(7)
    assert drafter.choose([a_decode(request)], 100) == {}


def test_nothing_is_proposed_where_rows_or_the_draft_model_are_dear() -> None:
    for drafter in (a_drafter(DEAR_ROWS), a_drafter(CHEAP_ROWS, size_ratio=1.0)):
        asked = []
        for _ in range(FIRST_PROBES + 5):
            asked.append(drafter.proposals([a_decode(a_request())], 100))
            idle = Iteration(Step(StepId(0), ()), ())
            drafter.iteration_took(idle, StepResult(StepId(0), (), 0.01), 0.0)
        assert [bool(found) for found in asked] == [True] * FIRST_PROBES + [False] * 5


def test_first_probes_find_a_draft_model_that_pays_though_its_prior_rate_does_not() -> None:
    drafter, requests = a_drafter(CHEAP_ROWS, 0.5), [a_request(number=at) for at in range(2)]
    for _ in range(2 * FIRST_PROBES):
        found = drafter.proposals([a_decode(one) for one in requests], 1000)
        for place, spec in found.items():
            returns(drafter, requests[place], spec, (7, 7, 7, 7))
        for request in requests:
            request.output += [7] * 4
            request.num_computed = request.num_tokens - 1
        drafter.choose([a_decode(one) for one in requests], 1000)
    assert len(found) == 2


def test_the_time_of_passes_is_learned() -> None:
    drafter, request = a_drafter(CHEAP_ROWS), a_request()
    for _ in range(20):
        found = drafter.proposals([a_decode(request)], 100)
        if not found:
            break
        spec = found[0]
        request, entry = a_decode(request)
        request.num_computed = entry.start + 1
        request.output.append(7)
        iteration = Iteration(Step(StepId(0), (entry._replace(proposal=spec),)), (request,))
        slow = StepResult(StepId(0), (7,), 9.0, proposals=((8,),), proposal_seconds=8.0)
        drafter.iteration_took(iteration, slow, 0.0)
    assert found == {}


def test_a_proposal_never_goes_beyond_the_last_token() -> None:
    request = a_request(produced=497)
    request.num_pending = 1  # the entry's own
    found = a_drafter(CHEAP_ROWS).proposals([a_decode(request)], 1000)
    spec = found[0]
    assert spec.num_tokens <= 1


def test_a_long_prompt_is_computed_in_pieces_if_drafts_will_pay() -> None:
    request = a_request(prompt_len=300)
    drafter = a_drafter(CHEAP_ROWS)
    spec = drafter.proposals([a_decode(request)], 64)[0]
    assert spec == ProposalSpec(0, 0, tuple(range(64)))
    returns(drafter, request, spec, ())
    assert request.num_drafted == 64
    assert drafter.proposals([a_decode(request)], 64)[0].start == 64
    nearly_done = Request(
        RequestId(1), RequestSpec(tuple(range(3000)), 6, SamplingParams()), Times(0.0), output=[7]
    )
    assert drafter.proposals([a_decode(nearly_done)], 5000) == {}


def test_wrong_proposals_end_and_are_probed_within_a_share_of_the_time() -> None:
    drafter, request = a_drafter(CHEAP_ROWS), a_request()
    num_asked = 0
    for number in range(300):
        found = drafter.proposals([a_decode(request)], 1000)
        drafter.choose([a_decode(request)], 1000)
        num_asked += number >= 100 and bool(found)
        if found:
            returns(drafter, request, found[0], (8, 8, 8, 8))
        else:
            request.output.append(7)
            request.num_computed += 1
        drafter.iteration_took(
            Iteration(Step(StepId(0), ()), ()), StepResult(StepId(0), (), 1.0), 0.0
        )
    assert 1 <= num_asked <= 20


def test_plans_take_a_share_of_the_time_while_proposals_do_not_pay() -> None:
    cost = LiveCost(DEAR_ROWS)
    model = DraftModelProposer(cost, 0.5)
    candidates = [
        Candidate(number, *a_decode(a_request(number=number)), [0.5, 0.3], 8)
        for number in range(64)
    ]
    num_plans, idle = 0, Iteration(Step(StepId(0), ()), ())
    for _ in range(1000):
        if model.may_plan(len(candidates)):
            model.plan(candidates, 64, 0.05, 100, inf)
            num_plans += 1
        model.committed(idle, StepResult(StepId(0), (), 0.05))
    spent = (num_plans - 1) * DRAFT_SECONDS * len(candidates)
    assert 0.0 < spent <= PLAN_SHARE * 1000 * 0.05


def test_every_iteration_is_planned_while_proposals_pay() -> None:
    cost = LiveCost(CHEAP_ROWS)
    model = DraftModelProposer(cost, 0.05)
    candidate = Candidate(0, *a_decode(a_request()), [0.9, 0.8], 8)
    for _ in range(2000):
        assert model.may_plan(64)
        assert model.plan([candidate], 1, 1.0, 100, inf)


def test_a_bound_on_the_iteration_bounds_the_proposals() -> None:
    request = a_request()
    cost = LiveCost(CHEAP_ROWS)
    model = DraftModelProposer(cost, 0.05)
    candidate = Candidate(0, *a_decode(request), [0.9, 0.8, 0.7, 0.6], 8)
    free = model.plan([candidate], 1, 1.0, 100, inf)
    assert free[0].num_tokens == 4
    assert model.plan([candidate], 1, 1.0, 100, 1.1)[0].num_tokens == 1
    assert model.plan([candidate], 1, 1.0, 4, inf) == {}


@pytest.mark.parametrize("state", [State.LEAVING, State.WAITING, State.FINISHED])
def test_proposals_for_a_request_without_kv_are_dropped(state: State) -> None:
    drafter, request = a_drafter(CHEAP_ROWS), a_request()
    spec = drafter.proposals([a_decode(request)], 100)[0]
    request.state = state
    returns(drafter, request, spec, (7, 8))
    assert request.num_drafted == 0
    assert drafter.choose([a_decode(request)], 100) == {}
