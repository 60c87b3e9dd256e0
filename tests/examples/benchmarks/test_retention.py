import pytest

from examples.benchmarks.virtual_time import retention
from examples.benchmarks.virtual_time.retention import run


def test_what_is_retained_for_an_agent_is_there_after_its_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RATE": 2.0, "WAIT": 150.0, "NUM_SLOTS": 200_000}.items():
        monkeypatch.setattr(retention, name, value)
    without, with_time = run(2, 0.0), run(2, 3600.0)
    assert without["second turn cached"] == 0.0
    assert with_time["second turn cached"] > 0.9
    assert with_time["others cached"] > 0.9 * without["others cached"]
