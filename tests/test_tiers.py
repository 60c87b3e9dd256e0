"""The table of tiers names folders and files that exist, so that none loses its marker."""

import pytest

from tests.conftest import TESTS, TIERS


@pytest.mark.parametrize("path", TIERS)
def test_every_path_with_a_marker_exists(path: str) -> None:
    assert (TESTS / path).exists()


def test_every_marker_is_registered(pytestconfig: pytest.Config) -> None:
    registered = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert set(TIERS.values()) | {"gpu"} <= registered
