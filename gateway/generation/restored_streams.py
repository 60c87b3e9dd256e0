"""Streams that a former server left: their events can be read again, and those that had not ended
run again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from engine.errors import EngineError, InvalidRequest
from gateway.access.callers import Caller
from gateway.errors import ModelNotFound, StoreFailed
from gateway.generation.held_stream import EndedStream, held_under
from gateway.generation.plan import GenerationPlan
from gateway.generation.stream_journal import JournalEntry, Origin
from gateway.service import Service, model_named
from gateway.store.journal import Ended, StreamRecord

Planner = Callable[[bytes, Caller, "Service"], Awaitable[object]]
Later = Callable[[], Coroutine[Any, Any, None]]
logger = logging.getLogger(__name__)


async def restore_streams(service: Service, planners: Mapping[str, Planner]) -> Later:
    """Let the streams that a former server left be read again; those that had not ended run again.
    Returns what lets those run again whose models are not loaded, which may take long.
    `planners` are the routes' functions from a body to a plan, by path."""
    journal = service.store.journal
    try:
        for ended in await journal.ended(service.unix_now()):
            if await _is_current(ended.record, service):
                _restore(ended, service)
        records = await journal.running()
    except StoreFailed as error:
        logger.error("the streams of the former server are lost: %s", error)
        records = []
    waiting = [record for record in records if not _is_loaded(record.body, service)]
    await _run_all([record for record in records if record not in waiting], service, planners)
    for record in waiting:
        seconds = service.groups.find(model_named(record.body)).load_seconds
        service.store.held.expect(record.tenant, record.names, seconds)
    return partial(_run_all, waiting, service, planners)


def _is_loaded(body: bytes, service: Service) -> bool:
    """Whether the model that a body names is loaded, or is none of this server's."""
    try:
        return service.groups.are_fixed or service.groups.find(model_named(body)).accepts
    except ModelNotFound:
        return True


async def _run_all(
    records: Sequence[StreamRecord], service: Service, planners: Mapping[str, Planner]
) -> None:
    for record in records:
        try:
            if await _is_current(record, service):
                await _run_again(record, service, planners)
        except Exception as error:  # one stream must not keep the server from starting
            if not isinstance(error, EngineError):
                logger.exception("the stream of %s", record.request_id)
            logger.warning("the stream of %s cannot run again: %s", record.request_id, error)
            if isinstance(error, InvalidRequest):
                await JournalEntry(service, record).remove()
        finally:
            service.store.held.expect(record.tenant, record.names, None)


async def _is_current(record: StreamRecord, service: Service) -> bool:
    """Whether no later stream has its conversation; otherwise its record is removed. Beside a
    former server, a client may begin that stream here before this one can be restored."""
    named = service.store.held.named(record.tenant)
    later = (named.get(name) for name in record.names)
    if not any(isinstance(s, EndedStream) and s.created_at >= record.created_at for s in later):
        return True
    await JournalEntry(service, record).remove()
    return False


def _restore(ended: Ended, service: Service) -> None:
    record, held = ended.record, service.store.held
    entry = JournalEntry(service, record, is_known=True)
    ring = held.open(record.tenant, record.names)
    stream = EndedStream(service, ring, record.created_at, entry)
    stream.restore(ended.events)
    held.add(stream, record.names)
    held.ended(stream)


async def _run_again(
    record: StreamRecord, service: Service, planners: Mapping[str, Planner]
) -> None:
    key = service.keys.named(record.tenant)
    planner = planners.get(record.path)
    if key is None or planner is None:
        raise InvalidRequest("its API key or its endpoint does not exist any more")
    caller = Caller(record.request_id, service.clock()).authenticated(key)
    async with service.at_model_of(record.body) as serving:
        if record.fingerprint != serving.model.fingerprint:
            raise InvalidRequest("the model is another one now")
        origin = Origin.again(record, serving)
        plan = await planner(record.body, caller, origin.service)
        origin.planned()
        assert isinstance(plan, GenerationPlan), "only such plans are journalled"
        entry = JournalEntry(origin.service, record, is_known=True)
        held_under(record.names, plan, origin.service, entry)
        await asyncio.sleep(0)  # the stream has begun, and keeps the model loaded
