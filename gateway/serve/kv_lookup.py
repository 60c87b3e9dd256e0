"""KVLookup: asks a shared store of KV which blocks of a prompt it has, never on the event loop."""

import asyncio
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.kv_store import SharedStore
from gateway.observe.metrics import Metrics

LOOKUP_SECONDS = 0.1  # a request waits so long at most
THREADS = 2


class KVLookup:
    """A `StoreLookup`. While all threads wait for the store, nothing is looked up."""

    def __init__(self, store: SharedStore, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(THREADS, "kv-lookup")
        self._num_running = 0

    async def find(self, names: Sequence[bytes]) -> Container[bytes]:
        """Counts the outcome: found (at least one name), missing or failed."""
        outcome, found = "failed", set[bytes]()
        if self._num_running < THREADS:
            answer = await self._ask(names)
            if answer is not None:
                found = {name for name, is_there in zip(names, answer, strict=True) if is_there}
                outcome = "found" if found else "missing"
        self._metrics.kv_lookups[outcome] += 1
        return found

    async def _ask(self, names: Sequence[bytes]) -> Sequence[bool] | None:
        running = self._threads.submit(self._store.exists, names)
        future = asyncio.wrap_future(running)
        self._num_running += 1
        future.add_done_callback(self._ended)
        done, _ = await asyncio.wait([future], timeout=LOOKUP_SECONDS)
        return future.result() if done else None

    def _ended(self, _: object) -> None:
        self._num_running -= 1

    def close(self) -> None:
        """End the threads and the client."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()
