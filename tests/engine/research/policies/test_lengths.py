"""Kaplan-Meier by hand: ended and censored outputs, decay, percentiles, and what is saved."""

import pytest

from engine.research.policies import lengths
from engine.research.policies.lengths import EDGES, NUM_BINS, LearnedLengths, bin_of, stratum_of

NONE = [0.0] * NUM_BINS


def observe(
    learned: LearnedLengths, length: int, *, is_censored: bool = False, stratum: int = 0
) -> None:
    """An output of `length` tokens; a censored one is known to be longer than that."""
    last = bin_of(length)
    for number in range(last + is_censored):
        learned.passed(stratum, number)
    if not is_censored:
        learned.ended(stratum, last)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> LearnedLengths:
    """Without decay, and with almost no weight on what is assumed before any observation."""
    monkeypatch.setattr(lengths, "DECAY", 1.0)
    monkeypatch.setattr(lengths, "TAIL_WEIGHT", 1e-12)
    return LearnedLengths()


def test_bins_are_contiguous_and_hold_the_lengths_between_their_edges() -> None:
    assert [bin_of(length) for length in (1, 2, 9, 10, 11, 12)] == [0, 1, 8, 9, 9, 10]
    for number in range(NUM_BINS - 1):
        assert bin_of(EDGES[number]) == number
        assert bin_of(EDGES[number + 1] - 1) == number
    assert bin_of(10**9) == NUM_BINS - 1


def test_hazards_are_those_of_kaplan_and_meier(exact: LearnedLengths) -> None:
    """Six outputs: of 1, 2, 2 and 4 tokens, one that runs after 2, and one cut after 3.

    At risk at lengths 1 to 4: 6, 5, 2, 1. So the survival is 5/6, then 5/6 * 3/5 = 1/2 for two.
    """
    for length in (1, 2, 2, 4):
        observe(exact, length)
    observe(exact, 2, is_censored=True)
    observe(exact, 3, is_censored=True)
    hazards = exact.hazards()
    assert hazards[:4] == pytest.approx([1 / 6, 2 / 5, 0.0, 1.0], abs=1e-9)
    assert exact.num_observed == 4


def test_censored_outputs_make_the_estimate_longer(exact: LearnedLengths) -> None:
    for length in (1, 2, 3):
        observe(exact, length)
    before = exact.hazards()[:3]
    observe(exact, 3, is_censored=True)
    assert all(after < old for after, old in zip(exact.hazards(), before, strict=False))


def test_a_bin_without_observations_has_the_assumed_hazard() -> None:
    learned = LearnedLengths()
    observe(learned, 3)
    assert learned.hazards()[10] == pytest.approx(lengths.TAIL_HAZARD)


def test_old_observations_weigh_less_and_no_weight_overflows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In units of the first output of 2 tokens: those of 1 token weigh 1/2 + 1/4 + ... = 1, those
    of 2 tokens 1, 2 and 4."""
    monkeypatch.setattr(lengths, "DECAY", 0.5)
    learned = LearnedLengths()
    for _ in range(200):
        observe(learned, 1)
    for _ in range(3):
        observe(learned, 2)
    assert learned._all.ended[0] / learned._all.reached[0] == pytest.approx(1 / 8)
    assert max(learned._all.reached) / learned._weight < 10.0


def test_quantiles_are_the_ends_of_bins(exact: LearnedLengths) -> None:
    assert exact.quantile(0.5) == 0
    for length in (1, 3, 3, 5):
        observe(exact, length)
    assert [exact.quantile(share) for share in (0.2, 0.5, 0.7, 0.9)] == [1, 3, 3, 5]


def test_a_stratum_departs_from_the_estimate_of_all_requests_with_observations() -> None:
    learned = LearnedLengths()
    for _ in range(300):
        observe(learned, 1)
    assert learned.stratum_hazards(7, learned.hazards()) == learned.hazards()
    for _ in range(5):
        observe(learned, 9, stratum=7)
    few = learned.stratum_hazards(7, learned.hazards())[0]
    for _ in range(100):
        observe(learned, 9, stratum=7)
    many = learned.stratum_hazards(7, learned.hazards())[0]
    assert learned.stratum_hazards(0, learned.hazards())[0] > 0.9 > few > 0.5
    assert many < 0.1


def test_prompts_of_similar_length_are_a_stratum() -> None:
    assert stratum_of(1) == 0
    assert stratum_of(1100) == stratum_of(1200)
    assert stratum_of(1100) < stratum_of(1400)
