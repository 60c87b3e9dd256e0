"""Two servers that share a store of KV: what one computed, the other finds. A store that is down
costs no request."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import read_url, start_server
from tests.mooncake_master import need_mooncake, running_master
from tests.serving.prefixes.test_disk_tier import FLAGS, STORY, cached, chat, text, until_saved

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with running_master("256MiB") as url:
        yield url


def lookups(url: str) -> dict[str, float]:
    """Lookups in the store by outcome."""
    start = 'podway_kv_store_lookups_total{outcome="'
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = (line[len(start) :].split('"} ') for line in lines if line.startswith(start))
    return {outcome: float(count) for outcome, count in found}


def test_a_prefix_that_one_server_computed_is_found_by_another(store: str, tmp_path: Path) -> None:
    flags = (*FLAGS, "--kv-store", store)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with start_server(tmp_path / "one", *flags) as one:
        first_url = read_url(one)
        first = chat(first_url, STORY)
        until_saved(first_url, "store")
        turns = (STORY, text(first), "And what is 4 + 4?")
        with start_server(tmp_path / "other", *flags) as other:
            url = read_url(other)
            second = chat(url, *turns)
            assert cached(second) >= first["usage"]["prompt_tokens"]
            assert lookups(url)["found"] == 1
            assert cached(chat(url, "Something else. " * 40)) == 0
        assert text(second) == text(chat(first_url, *turns))


def test_a_store_that_is_down_costs_no_request(tmp_path: Path) -> None:
    need_mooncake()
    with start_server(tmp_path, *FLAGS, "--kv-store", "mooncake://127.0.0.1:9") as server:
        url = read_url(server)
        for _ in range(3):
            assert text(chat(url, STORY))
        assert lookups(url)["failed"] >= 1
        assert "--kv-store 127.0.0.1:9" in server.log.read_text()
