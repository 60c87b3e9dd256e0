"""BatchQueue: hands new batches from the routes to the batch runner, and cancels running ones."""

import asyncio

from gateway.store.batch_records import BatchRecord
from gateway.store.batches import Batches


class BatchQueue:
    """New batches in order of arrival, and a cancel event for each running batch."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.arrivals: asyncio.Queue[BatchRecord] = asyncio.Queue()
        self._cancelled: dict[str, asyncio.Event] = {}  # by id, of the running batches

    async def submit(self, record: BatchRecord, forget_before: int) -> None:
        """Store a new batch and queue it. Raises `TooManyBatches`."""
        await self.batches.add(record, forget_before)
        self.arrivals.put_nowait(record)

    async def cancel(self, batch_id: str, tenant: str, now: int) -> BatchRecord:
        """End a batch early; its answered lines are kept. Raises `BatchNotFound`."""
        record = await self.batches.cancel(batch_id, tenant, now)
        if record.status == "cancelling" and batch_id in self._cancelled:
            self._cancelled[batch_id].set()
        return record

    def open(self, batch_id: str) -> asyncio.Event:
        """Mark a batch as running. The returned event is set when it is cancelled."""
        return self._cancelled.setdefault(batch_id, asyncio.Event())

    def close(self, batch_id: str) -> None:
        """The batch no longer runs."""
        self._cancelled.pop(batch_id, None)
