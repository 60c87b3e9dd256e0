import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from gateway.observe.metrics import Metrics
from gateway.serve import kv_lookup
from gateway.serve.kv_lookup import KVLookup

A, B = b"a" * 16, b"b" * 16


class Store:
    """Has `A`; answers when it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_down = False
        self.threads: set[int] = set()

    def exists(self, names: Sequence[bytes]) -> Sequence[bool] | None:
        self.threads.add(threading.get_ident())
        self.may_answer.wait(10)
        return None if self.is_down else [name == A for name in names]

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def store() -> Iterator[Store]:
    found = Store()
    yield found
    found.may_answer.set()


def test_names_are_found_in_another_thread_and_outcomes_counted(store: Store) -> None:
    metrics = Metrics()

    async def main() -> None:
        lookup = KVLookup(store, metrics)  # type: ignore[arg-type] # only what is called
        assert await lookup.find([A, B]) == {A}
        assert await lookup.find([B]) == set()
        store.is_down = True
        assert await lookup.find([A]) == set()
        lookup.close()

    asyncio.run(main())
    assert metrics.kv_lookups == {"found": 1, "missing": 1, "failed": 1}
    assert threading.get_ident() not in store.threads


def test_a_store_that_hangs_is_not_asked_by_more_threads(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_lookup, "LOOKUP_SECONDS", 0.01)
    metrics = Metrics()
    store.may_answer.clear()

    async def main() -> None:
        lookup = KVLookup(store, metrics)  # type: ignore[arg-type] # only what is called
        for _ in range(5):
            assert await lookup.find([A]) == set()
        store.may_answer.set()
        while lookup._num_running:  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0)
        assert await lookup.find([A]) == {A}
        lookup.close()

    asyncio.run(main())
    assert metrics.kv_lookups == {"found": 1, "missing": 0, "failed": 5}
    assert len(store.threads) <= kv_lookup.THREADS
