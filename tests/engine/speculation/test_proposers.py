import pytest

from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.iteration import Iteration
from engine.media import Media
from engine.request import Request, RequestSpec, Times
from engine.speculation.acceptance import UNKNOWN, AcceptanceRates, bucket_of
from engine.speculation.budget import ASK_SECONDS, FIRST_STEPS, SHARE
from engine.speculation.drafter import Drafter
from engine.speculation.gain import MAX_SLOWDOWN
from engine.speculation.prediction import PredictionProposer
from engine.speculation.proposers import (
    NO_PROPOSAL,
    TOKENS_PER_CALL,
    NgramProposer,
    Proposal,
    Proposer,
    SuffixProposer,
)
from engine.speculation.settings import SpeculationSettings
from engine.speculation.token_index import END, Match, TokenIndex
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId, StepResult
from tests.blank import blank

NGRAM = SpeculationSettings("ngram", 4, lookup_min=2, lookup_max=8)
SUFFIX = SpeculationSettings("suffix", 4, lookup_min=2, lookup_max=8)
CHEAP_ROWS = CostModel.linear(per_step=1.0, per_token=0.001, per_slot=0.0)
DEAR_ROWS = CostModel.linear(per_step=0.001, per_token=1.0, per_slot=0.0)


def took(seconds: float) -> StepResult:
    """The result of a step without entries."""
    return StepResult(StepId(0), (), seconds)


def a_request(
    prompt: tuple[int, ...], output: tuple[int, ...] = (), number: int = 0, **fields: object
) -> Request:
    spec = RequestSpec(prompt, 1000, SamplingParams(), **fields)  # type: ignore[arg-type]
    return Request(RequestId(number), spec, Times(0.0), output=list(output))


def test_an_index_finds_the_longest_suffix_and_the_latest_of_equally_long_ones() -> None:
    index = TokenIndex(2)
    index.extend((1, 2, 3, 9, 2, 3, 7, 1, 2, 3))
    assert index.find((1, 2, 3)) == Match(3, [2])
    assert index.find((8, 2, 3)) == Match(2, [5, 2])
    assert index.find((4, 4)).length == 0
    assert index.follow(2, 3) == [9, 2, 3]


def test_a_copy_at_the_end_of_the_text_repeats_what_it_copied() -> None:
    index = TokenIndex(2)
    index.extend((5, 6, 5, 6))
    assert index.follow(index.find((5, 6)).ends[0], 5) == [5, 6, 5, 6, 5]


def test_a_copy_ends_where_its_text_ends() -> None:
    index = TokenIndex(2)
    index.extend((1, 2, 3, END, 4, 5))
    assert index.follow(1, 4) == [3]


def test_ngram_proposes_what_followed_the_last_tokens_before() -> None:
    proposer = NgramProposer(NGRAM)
    request = a_request((1, 2, 3, 4, 5), (9, 2, 3))
    assert proposer.propose(request, 3) == Proposal((4, 5, 9), 2)
    request.output.append(8)
    assert proposer.propose(request, 3) == NO_PROPOSAL


@pytest.mark.parametrize("proposer", [NgramProposer(NGRAM), SuffixProposer(SUFFIX)])
def test_no_guess_has_or_matches_the_tokens_that_stand_for_images(proposer: Proposer) -> None:
    image = 90
    media = tuple(Media(start, 4, bytes(32), blank(16, 1, 8), (1, 4, 4)) for start in (2, 12))
    prompt = (5, 6, *[image] * 4, 7, 8, 9, 1, 5, 6, *[image] * 4, 7)
    request = a_request(prompt, media=media)
    assert proposer.propose(request, 4) == NO_PROPOSAL, "one token of text behind the image"
    request.output += [8]
    assert proposer.propose(request, 4).tokens[:2] == (9, 1)
    request.output += [3, 1, 5, 6]
    assert not proposer.propose(request, 4).tokens, "an image followed"


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    proposer = NgramProposer(NGRAM)
    request = a_request((*range(3000), 1, 2))
    assert TOKENS_PER_CALL < 3000
    assert proposer.propose(request, 2) == NO_PROPOSAL
    assert proposer.propose(request, 2) == Proposal((3, 4), 2)


def test_suffix_proposes_from_earlier_outputs_with_the_same_salt_only() -> None:
    proposer = SuffixProposer(SUFFIX)
    proposer.forget(a_request((1,), (5, 6, 7, 8, 9), number=1, salt="mine"))
    mine = a_request((1,), (5, 6), number=2, salt="mine")
    other = a_request((1,), (5, 6), number=3, salt="other")
    assert proposer.propose(mine, 4) == Proposal((7, 8), 2)  # as many as were matched
    assert proposer.propose(other, 4) == NO_PROPOSAL


def test_suffix_proposes_the_most_frequent_continuation() -> None:
    proposer = SuffixProposer(SUFFIX)
    for number, token in enumerate((7, 8, 7), 1):
        proposer.forget(a_request((1,), (5, 6, token, token), number=number))
    proposer.forget(a_request((1,), (5, 6, 8, 9), number=4))
    proposer.forget(a_request((1,), (5, 6, 7, 9), number=5))
    assert proposer.propose(a_request((1,), (5, 6), number=6), 2).tokens == (7, 7)


def test_old_outputs_are_dropped() -> None:
    proposer = SuffixProposer(SpeculationSettings("suffix", 4, 2, 8, max_cached_requests=2))
    for number in range(1, 5):
        proposer.forget(a_request((1,), (10 * number, 5, 6), number=number))
    assert proposer.propose(a_request((1,), (10, 5), number=9), 4) == NO_PROPOSAL
    assert proposer.propose(a_request((1,), (40, 5), number=10), 4).tokens == (6,)


@pytest.mark.parametrize(
    ("output", "tokens"),
    [
        ((), (1, 2, 3)),
        ((1, 2), (3, 4, 5)),
        ((1, 2, 50), (3, 4, 5)),  # inserted
        ((1, 2, 4, 5), (6, 7, 8)),  # removed
        ((1, 2, 50, 4, 5), (6, 7, 8)),  # replaced
        (tuple(range(1, 10)), ()),
    ],
)
def test_a_prediction_is_followed_through_edits(
    output: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    proposer = PredictionProposer()
    request = a_request((99,), (), prediction=tuple(range(1, 10)))
    for length in range(len(output) + 1):
        request.output[:] = output[:length]
        found = proposer.propose(request, 3)
    assert found.tokens == tokens


def test_rates_follow_what_was_right() -> None:
    everyone = AcceptanceRates()
    rates = AcceptanceRates(everyone)
    assert rates.cumulative(3, 2) == [UNKNOWN, UNKNOWN**2]
    for _ in range(50):
        rates.compare(Proposal((1, 2), 3), [1, 9])
    assert rates.rate(bucket_of(3)) > 0.95
    assert rates.rate(bucket_of(4)) < 0.05
    assert everyone.rate(bucket_of(3)) > 0.9


def decodes(*requests: Request) -> list[tuple[Request, StepEntry]]:
    spec = SampleSpec(SamplingParams())
    return [
        (r, StepEntry(r.request_id, r.num_tokens - 1, (r.output[-1],), b"", spec)) for r in requests
    ]


def trained(drafter: Drafter, request: Request) -> None:
    """Let the request see that its guesses are right."""
    for _ in range(45):
        drafter.choose(decodes(request), 100)
        request.output += [7] * 10


def test_decodes_without_a_guess_are_delayed_little() -> None:
    model = CostModel.linear(per_step=1.0, per_token=0.03, per_slot=0.0)
    drafter = Drafter([Always()], 40, LiveCost(model))
    sure, unsure = a_request((1,), (7,)), a_request((1,), (3,), number=1)
    trained(drafter, sure)
    (alone,) = drafter.choose(decodes(sure), 100).values()
    (beside,) = drafter.choose(decodes(sure, unsure), 100).values()
    assert len(alone) > len(beside) > 4
    assert 1.06 + 0.03 * len(beside) <= MAX_SLOWDOWN * 1.06
    (bounded,) = drafter.choose(decodes(sure), 100, 1.2).values()
    assert 1.03 + 0.03 * len(bounded) <= 1.2


def test_background_requests_have_drafts_only_if_there_are_no_others() -> None:
    drafter = a_drafter(CHEAP_ROWS)
    behind, before = a_request((1,), (7,), is_background=True), a_request((1,), (7,), number=1)
    assert drafter.choose(decodes(behind, before), 100).keys() == {1}
    assert drafter.choose(decodes(behind), 100).keys() == {0}


def test_requests_without_drafts_are_asked_in_rotation_within_the_budget() -> None:
    lone = 20.5 * ASK_SECONDS / FIRST_STEPS
    proposer = Always()
    drafter = Drafter([proposer], 4, LiveCost(CostModel.linear(0.0, lone, 0.0)))
    many = decodes(*[a_request((1,), (7,), number=number) for number in range(100)])
    for _ in range(2):
        assert drafter.choose(many, 500) == {}
    assert len(proposer.asked) == 20
    drafter.iteration_took(Iteration(Step(StepId(0), ()), ()), took(5.5 * ASK_SECONDS / SHARE), 0.0)
    drafter.choose(many, 500)
    assert len(proposer.asked) == 25
    assert len(set(proposer.asked)) > 1


def in_flight(*requests: Request, number: int = 0) -> Iteration:
    """An iteration of decodes of these requests."""
    return Iteration(
        Step(StepId(number), tuple(entry for _, entry in decodes(*requests))), requests
    )


def test_requests_are_planned_ahead_while_their_drafts_are_not_worth_it() -> None:
    drafter, request = a_drafter(DEAR_ROWS), a_request((1,), (7,))
    asked = []
    for number in range(200):
        iteration, before = in_flight(request, number=number), drafter.budget.seconds
        assert drafter.waiting(iteration, {request}) == set()
        if drafter.budget.seconds < before:
            asked.append(number)
        request.output.append(7)
        drafter.iteration_took(iteration, took(1.0), 0.0)
    assert asked[:3] == [0, 1, 4]  # the pauses become longer
    assert len(asked) < 13


def test_requests_wait_for_their_drafts_while_they_are_worth_it() -> None:
    drafter, request = a_drafter(CHEAP_ROWS), a_request((1,), (7,))
    for number in range(20):
        iteration = in_flight(request, number=number)
        assert drafter.waiting(iteration, {request}) == {request}
        spent = drafter.budget.seconds
        assert drafter.waiting(iteration, {request}) == {request}
        assert drafter.budget.seconds == spent, "it is not asked again"
        assert drafter.choose(decodes(request), 100)
        request.output += [7] * 5
        drafter.iteration_took(iteration, took(1.0), 0.0)


@pytest.mark.parametrize("gap", [0.1, 3.0])
def test_all_wait_if_that_costs_little_and_else_those_which_expect_most(gap: float) -> None:
    drafter = a_drafter(CHEAP_ROWS)
    sure = a_request((1,), (7,))
    others = [a_request((1,), (3,), number=number) for number in range(1, 4)]
    trained(drafter, sure)
    drafter.budget.draft_gap = gap
    ahead, before = {sure, *others}, drafter.budget.seconds
    found = drafter.waiting(in_flight(sure, *others), ahead)
    assert found == (ahead if gap < 1.0 else {sure})
    missed = 0.0 if gap < 1.0 else 1.004 / 4  # of the time of an iteration
    assert before - drafter.budget.seconds == pytest.approx(missed, abs=10 * ASK_SECONDS)


class Always:
    """Proposes 7 after 7, for ever."""

    name = "always"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, request: Request, count: int) -> Proposal:
        self.asked.append(request.request_id)
        if request.output[-1] != 7:
            return NO_PROPOSAL
        return Proposal((7,) * count, 5)

    def forget(self, request: Request) -> None:
        """Keeps nothing."""


def a_drafter(model: CostModel) -> Drafter:
    proposer: Proposer = Always()
    return Drafter([proposer], 4, LiveCost(model))


def test_drafts_are_chosen_as_long_as_they_raise_the_expected_tokens_per_second() -> None:
    cheap = a_drafter(CHEAP_ROWS).choose(decodes(a_request((1,), (7,))), 100)
    assert cheap == {0: (7, 7, 7, 7)}
    assert a_drafter(DEAR_ROWS).choose(decodes(a_request((1,), (7,))), 100) == {}


def test_drafts_use_only_the_tokens_that_are_left() -> None:
    found = a_drafter(CHEAP_ROWS).choose(
        decodes(a_request((1,), (7,)), a_request((1,), (7,), number=1)), 3
    )
    assert sum(map(len, found.values())) == 3


def test_wrong_guesses_end_the_drafts_and_right_ones_bring_them_back() -> None:
    model = CostModel.linear(per_step=1.0, per_token=0.1, per_slot=0.0)
    drafter, request = a_drafter(model), a_request((1,), (7,))
    iteration = Iteration(Step(StepId(0), ()), ())
    for _ in range(45):
        found = drafter.choose(decodes(request), 100)
        drafter.iteration_took(iteration, took(1.0), 0.0)
        request.output += (3, 7)
    assert found == {}
    for _ in range(45):
        found = drafter.choose(decodes(request), 100)
        drafter.iteration_took(iteration, took(1.0), 0.0)
        request.output.append(7)
    assert found == {0: (7, 7, 7, 7)}


def test_no_draft_is_behind_the_last_token_or_an_end_token_or_the_least_length() -> None:
    sampling = SamplingParams()
    last = Request(RequestId(0), RequestSpec((1,), 3, sampling), Times(0.0), output=[7])
    ends = Request(
        RequestId(1), RequestSpec((1,), 9, sampling, frozenset({7})), Times(0.0), output=[7]
    )
    least = Request(
        RequestId(2),
        RequestSpec((1,), 9, sampling, frozenset({3}), min_tokens=4),
        Times(0.0),
        output=[7],
    )
    found = a_drafter(CHEAP_ROWS).choose(decodes(last, ends, least), 100)
    assert found == {0: (7,), 2: (7, 7)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"method": "eagle"},
            "method is 'eagle'; supported: ngram, suffix, prediction, draft_model, mtp",
        ),
        ({"method": "draft_model"}, "model is None; the draft model must be named"),
        ({"method": "draft_model", "model": "m", "prompt_lookup_min": 2}, "is no key of draft_m"),
        ({"method": "ngram", "model": "m"}, "'model' is no key of ngram"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min is larger",
        ),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "min_token_prob is 2"),
    ],
)
def test_a_wrong_config_is_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationSettings.parse(config)


def test_the_config_has_vllms_keys() -> None:
    parsed = SpeculationSettings.parse(
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    )
    assert (parsed.num_drafts, parsed.lookup_min, parsed.lookup_max) == (5, 2, 4)
    parsed = SpeculationSettings.parse(
        {"method": "draft_model", "model": "a/b", "num_speculative_tokens": 3}
    )
    assert (parsed.num_drafts, parsed.model) == (3, "a/b")
    for method in ("mtp", "qwen3_5_mtp", "qwen3_next_mtp"):
        parsed = SpeculationSettings.parse({"method": method, "num_speculative_tokens": 2})
        assert (parsed.method, parsed.num_drafts) == ("mtp", 2)
