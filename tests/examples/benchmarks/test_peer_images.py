from typing import Any

from examples.benchmarks.peers.images import page


def a_round(seconds: float, p99: float) -> dict[str, Any]:
    gaps = {"p50": 20.0, "p99": p99}
    return {
        "prompt_tokens": 1100,
        "first_seconds": seconds,
        "later_seconds": 0.2,
        "later_computed_tokens": 14,
        "undisturbed": gaps,
        "beside": gaps,
        "longest_ms": 4.0 * p99,
        "sent": 10,
        "answered": 1,
    }


def test_each_median_has_its_range_and_the_least_of_a_model_is_bold() -> None:
    podway = [a_round(each, 50.0) for each in (9.0, 7.0, 8.0)]
    other = [a_round(each, 3000.0) for each in (5.0, 6.0, 7.0)]
    run = {"machine": "m", "load_before": 0.1, "rounds": 3, "rate": 1.0, "seconds": 10.0}
    text = page(run | {"models": {"Small": {"Podway": podway, "llama-server": other}}})
    (first,) = (line for line in text.splitlines() if line.startswith("| Small | Podway"))
    (second,) = (line for line in text.splitlines() if line.startswith("| Small | llama"))
    assert "| 8.00 (7.00 to 9.00) |" in first
    assert "20.0 / **50.0** (50.0 to 50.0)" in first
    assert "| **6.00** (5.00 to 7.00) |" in second
    assert "20.0 / 3000.0 (3000.0 to 3000.0)" in second
    assert "**12000**" not in second
    assert first.endswith("| 3 of 30 |")
