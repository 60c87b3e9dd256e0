"""Pages of results that a command has written whole are what it writes of their JSON file."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from examples.benchmarks.server import disk_tier, lora_server
from tests.examples.benchmarks.published import RESULTS, read

Page = Callable[[Mapping[str, Any]], str]
PAGES: dict[str, Page] = {
    "lora/server": lora_server.page,
    "disk_tier/read_ahead": disk_tier.read_ahead_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_that_of_its_run(name: str) -> None:
    found = read(f"{name}.json")
    assert (RESULTS / f"{name}.md").read_text() == PAGES[name](found)
