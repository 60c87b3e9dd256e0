"""What the store's journal keeps of one held stream.

Everything random in a journalled request (ids, the seed of its sampling) comes from one seed, and
its dates from the moment in which it was planned first: so planned again, it has the same events.
"""

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gateway.errors import StoreFailed
from gateway.generation.plan import GenerationPlan
from gateway.generation.prompt import TokenizedPrompts
from gateway.service import Service
from gateway.store.journal import StreamRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a request is planned from. `service` has the request's own random numbers and date."""

    path: str
    body: bytes
    seed: int
    created_at: int
    service: Service

    @classmethod
    def new(cls, path: str, body: bytes, service: Service) -> "Origin":
        """A new request, before it is planned."""
        return cls._of(path, body, service.seed(), service.unix_now(), service)

    @classmethod
    def again(cls, record: StreamRecord, service: Service) -> "Origin":
        """A request of a former server."""
        return cls._of(record.path, record.body, record.seed, record.created_at, service)

    @classmethod
    def _of(cls, path: str, body: bytes, seed: int, created_at: int, service: Service) -> "Origin":
        dates = _Dates(created_at, service.unix_now)
        own = replace(service, random=random.Random(seed), unix_now=dates)
        return cls(path, body, seed, created_at, own)

    def planned(self) -> None:
        """The request is planned: dates are those of the clock from now on."""
        dates = self.service.unix_now
        assert isinstance(dates, _Dates), "set by _of"
        dates.is_first = False

    def record(self, plan: GenerationPlan, names: Sequence[str]) -> StreamRecord:
        """The journal's record of a new request."""
        caller, service = plan.caller, self.service
        return StreamRecord(
            id=f"{caller.request_id}-{self.seed:x}",
            tenant=caller.tenant,
            names=list(names),
            request_id=caller.request_id,
            path=self.path,
            body=self.body,
            seed=self.seed,
            created_at=self.created_at,
            fingerprint=service.model.fingerprint,
        )


class _Dates:
    """The clock of a request: the moment in which it was planned first, while it is planned."""

    def __init__(self, created_at: int, now: Callable[[], int]) -> None:
        self.is_first = True
        self._created_at = created_at
        self._now = now

    def __call__(self) -> int:
        return self._created_at if self.is_first else self._now()


class JournalEntry:
    """A stream's record in the journal. If the store fails, the stream goes on without."""

    def __init__(self, service: Service, record: StreamRecord, *, is_known: bool = False) -> None:
        """`is_known`: a former server has stored it."""
        self.is_known = is_known
        self._service = service
        self._record = record

    async def tokenize(self, plan: GenerationPlan) -> TokenizedPrompts:
        """The prompts of the plan: those that a former server stored, or which are stored now."""
        tokenized, record = await plan.tokenize(), self._record
        if self.is_known:
            known = [tuple(prompt) for prompt in record.prompts]
            return tokenized._replace(prompts=known) if known else tokenized
        is_plain = all(isinstance(prompt, list | tuple) for prompt in tokenized.prompts)
        prompts = [list(prompt) for prompt in tokenized.prompts] if is_plain else []
        try:
            await self._service.store.journal.add(record.with_prompts(prompts))
        except StoreFailed as error:
            logger.warning("the stream of %s is in memory only: %s", record.request_id, error)
        return tokenized

    async def end(self, events: bytes | None) -> None:
        """The stream has ended with these events; None if the first of them were evicted."""
        with suppress(StoreFailed):
            if events is None:
                await self._service.store.journal.remove(self._record.id)
            else:
                now = self._service.unix_now()
                await self._service.store.journal.end(self._record.id, events, now)

    async def remove(self) -> None:
        """Forget the stream."""
        with suppress(StoreFailed):
            await self._service.store.journal.remove(self._record.id)
