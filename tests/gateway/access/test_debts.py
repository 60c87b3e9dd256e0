import random

import pytest

from gateway.access.intake import MAX_DEBTORS, Debts

MAX = 1.0


def test_those_who_owe_repay_at_equal_rates_and_a_small_debt_is_soon_repaid() -> None:
    debts = Debts(MAX)
    debts.add("heavy", 0.5)
    debts.add("light", 0.1)
    debts.repay(0.1)
    assert (debts.of("heavy"), debts.of("light")) == pytest.approx((0.45, 0.05))
    debts.repay(0.2)
    assert (debts.of("heavy"), debts.of("light")) == pytest.approx((0.3, 0.0))
    assert len(debts) == 1
    debts.repay(10.0)
    assert len(debts) == 0
    debts.add("heavy", 0.2)
    assert debts.of("heavy") == pytest.approx(0.2), "what was repaid beyond the debts is not saved"


def test_a_debt_is_bounded() -> None:
    debts = Debts(MAX)
    for _ in range(3):
        debts.add("a", 0.7)
    assert debts.of("a") == pytest.approx(MAX)


def test_beyond_a_bound_the_smallest_debt_is_forgotten() -> None:
    debts = Debts(MAX)
    debts.add("heavy", MAX)
    for client in range(MAX_DEBTORS + 10):
        debts.add(str(client), 0.001)
    assert len(debts) == MAX_DEBTORS
    assert debts.of("heavy") == pytest.approx(MAX)


def test_debts_are_those_of_a_simple_model_and_the_heap_stays_small() -> None:
    debts, expected, draw = Debts(MAX), dict[str, float](), random.Random(0)
    for _ in range(5_000):
        client = str(draw.randrange(8))
        if draw.random() < 0.7:
            seconds = draw.random() * 0.01
            debts.add(client, seconds)
            expected[client] = min(expected.get(client, 0.0) + seconds, MAX)
        else:
            earned = draw.random() * 0.02
            debts.repay(earned)
            _repay(expected, earned)
        assert debts.of(client) == pytest.approx(expected.get(client, 0.0), abs=1e-9)
        assert len(debts._heap) < 100


def _repay(debts: dict[str, float], seconds: float) -> None:
    while debts and seconds > 0.0:
        step = min(seconds / len(debts), min(debts.values()))
        seconds -= step * len(debts)
        for client in list(debts):
            debts[client] -= step
            if debts[client] <= 1e-12:
                del debts[client]
