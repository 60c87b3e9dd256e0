import argparse

import pytest

from engine.worker.cpu.limits import PlainReads
from examples.benchmarks.server.lone_stream import measure, page

pytestmark = pytest.mark.process


def test_a_token_contains_a_step_and_a_gap(reads: PlainReads) -> None:
    options = argparse.Namespace(checkpoint="builtin", rounds=1, tokens=24)
    found = measure(options, "int8", reads, 1 << 20)
    assert found["weight_bytes"] == 1 << 20
    assert found["read"] > 0
    assert found["step"] > 0
    assert found["gap"] > 0


def test_the_page_has_a_row_for_each_format() -> None:
    row = {"format": "int8", "load": 0.5, "token": 10.0, "read": 7.5, "step": 9.0, "gap": 0.75}
    text = page({"cpu": "Zen", "cores": 2, "rounds": 3, "rows": [row]})
    assert "| int8 | 100.0 | 10.00 | 7.50 | 1.50 | 0.75 | 75 % |" in text
