from collections.abc import Iterator

import pytest

from tests.fuzz.openai_requests import SETTING, Operation, ask, operations
from tests.gateway.serve.live import listening

# `python -m tests.fuzz.openai_requests` sends more.
NUM_EXAMPLES = 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(SETTING) as live:
        yield live.url


@pytest.mark.parametrize(
    "operation", [*operations()], ids=lambda each: f"{each.method} {each.path}"
)
def test_a_described_request_is_answered_or_its_field_is_named(
    url: str, operation: Operation
) -> None:
    assert ask(url, operation, NUM_EXAMPLES).total() >= 1
