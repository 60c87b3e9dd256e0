"""WorkVariation: the squared coefficient of variation, and when it is large."""

from random import Random
from statistics import fmean, pvariance

from engine.research.policies.work_variation import WorkVariation


def test_the_squared_coefficient_of_variation_is_that_of_the_requests() -> None:
    random = Random(1)
    works = [random.expovariate(0.2) for _ in range(50)]
    variation = WorkVariation(20)
    for work in works:
        variation.ended(work)
    exact = pvariance(works) / fmean(works) ** 2
    assert abs(variation.squared / exact - 1.0) < 0.05  # the latest count a little more


def test_a_few_requests_are_no_large_variation() -> None:
    variation = WorkVariation(20)
    assert variation.squared == 0.0
    for number in range(19):
        variation.ended(100.0 if number % 5 == 0 else 1.0)
    assert not variation.is_large
    variation.ended(1.0)
    assert variation.is_large


def test_requests_alike_make_a_large_variation_small_again() -> None:
    variation = WorkVariation(20)
    for number in range(100):
        variation.ended(100.0 if number % 5 == 0 else 1.0)
    assert variation.is_large
    for _ in range(1000):
        variation.ended(20.0)
    assert not variation.is_large
