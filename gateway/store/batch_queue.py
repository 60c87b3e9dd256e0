"""Desk: where routes leave batches, and whoever runs them learns of it."""

import asyncio

from gateway.store.batches import Batches, BatchRecord


class BatchQueue:
    """New batches in order of arrival, and word of those that are to end early."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.arrivals: asyncio.Queue[BatchRecord] = asyncio.Queue()
        self._told: dict[str, asyncio.Event] = {}  # of the batches that somebody runs

    async def leave(self, record: BatchRecord, forget_before: int) -> None:
        """Keep a new batch and have it run (see `Batches.add`)."""
        await self.batches.add(record, forget_before)
        self.arrivals.put_nowait(record)

    async def cancel(self, batch_id: str, tenant: str, now: int) -> BatchRecord:
        """Have it end early (see `Batches.cancel`)."""
        record = await self.batches.cancel(batch_id, tenant, now)
        if record.status == "cancelling" and batch_id in self._told:
            self._told[batch_id].set()
        return record

    def take(self, batch_id: str) -> asyncio.Event:
        """Somebody runs this batch; the event says that it should end."""
        return self._told.setdefault(batch_id, asyncio.Event())

    def put_down(self, batch_id: str) -> None:
        """Nobody runs it any more."""
        self._told.pop(batch_id, None)
