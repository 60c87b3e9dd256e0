import signal

import pytest

from tests import conftest
from tests.conftest import MARKED, TESTS, TIERS, TIERS_RUN, is_left_out, tier_of


@pytest.mark.parametrize("path", TIERS)
def test_every_path_with_a_marker_exists(path: str) -> None:
    assert (TESTS / path).exists()


def test_every_marker_is_registered(pytestconfig: pytest.Config) -> None:
    registered = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert set(TIERS.values()) | {"gpu"} <= registered


def test_every_test_file_is_either_in_a_tier_or_in_none() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    left_out = {tiers: {file for file in files if is_left_out(file, tiers)} for tiers in TIERS_RUN}
    assert left_out["all"] == set()
    assert left_out["none"] == {file for file in files if tier_of(file) is not None}
    marked = {file for file in files if MARKED.search(file.read_text())}
    assert TESTS / "engine/worker/cpu/test_object_files.py" in marked
    assert left_out["only"] == set(files) - left_out["none"] - marked
    assert not is_left_out(TESTS, "only")
    assert is_left_out(TESTS / "examples", "none")
    assert not is_left_out(TESTS / "examples" / "conftest.py", "none")


def test_a_test_that_waits_for_ever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "MAX_SECONDS", 0.01)
    phase = conftest.fail_if_it_hangs()
    next(phase)
    with pytest.raises(pytest.fail.Exception, match=r"for more than 0\.01 seconds"):
        signal.pause()
    with pytest.raises(StopIteration):
        next(phase)
