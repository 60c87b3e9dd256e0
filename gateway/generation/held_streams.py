"""Responses of streams that are held: to new requests, and to those that read one again.

An event is named by its number, as in the SSE fields `id` and `last-event-id`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from starlette.types import ASGIApp, Scope

from engine.errors import InvalidRequest
from engine.request import Abort
from gateway.access.callers import Caller, header_of, valid_request_id
from gateway.access.retries import Attempt
from gateway.generation.choices import ChoiceGroup, generate_body
from gateway.generation.held_stream import (
    AcceptedResponse,
    EndedStream,
    HeldResponse,
    HeldStream,
    held_under,
)
from gateway.generation.plan import GenerationPlan
from gateway.generation.reply import Reply, SharedReply
from gateway.generation.stream_journal import JournalEntry, Origin
from gateway.schema.decoding import invalid
from gateway.service import Service

CONVERSATION = b"x-conversation-id"
LAST_EVENT = b"last-event-id"
HEADERS = frozenset({CONVERSATION, LAST_EVENT})
MAX_DIGITS = 18  # digits in the number of an event
RESUMED = "resumed"  # in the log line of a request that reads the events of another one


class FormerServer(Protocol):
    """The server before this one, after an upgrade, as long as it runs streams: `podway.former` in
    the scope of a request."""

    async def streams(self) -> list[dict[str, Any]]:
        """The streams of the caller there, as `GET /v1/streams` lists them. Raises
        `Unavailable`."""

    async def delete(self, name: str) -> None:
        """End a stream of the caller, if there is one."""


def resumed(scope: Scope, caller: Caller, service: Service) -> ASGIApp | None:
    """The response to a request that continues another one: a retry of one in flight, or one with
    `last-event-id`; None for a new request.

    Raises `InvalidRequest` or `StreamNotFound`.
    """
    attempt: Attempt | None = scope.get("podway.attempt")
    after = last_event(scope)
    if attempt is not None and (shared := attempt.shared) is not None:
        assert isinstance(shared, HeldStream | SharedReply), "shared by a response here"
        caller.note(RESUMED)
        return shared.response(caller, -1 if after is None else after)
    name = conversation_id(scope)
    if after is None:
        return None
    if name is None:
        raise InvalidRequest(
            "The header 'last-event-id' continues a stream that is held. Name it with the header "
            "'x-conversation-id', in this request and in the one that began it.",
            "last-event-id",
        )
    held = held_stream(name, caller, service)
    caller.note(RESUMED)
    return held.response(caller, after)


def held_stream(name: str, caller: Caller, service: Service) -> EndedStream:
    """A stream of this caller, which may run. Raises `StreamNotFound`."""
    stream = service.store.held.find(caller.tenant, name)
    assert isinstance(stream, EndedStream), "added by begin, or restored"
    return stream


def begin(
    plan: GenerationPlan, service: Service, names: Sequence[str], origin: Origin
) -> HeldStream:
    """Generate a plan's events. Without names, the stream ends when no attempt waits for it. One
    with names is in the journal; several choices have no order in which they could run again."""
    entry = None
    if names and service.store.journal.is_on and plan.num_candidates == 1:
        entry = JournalEntry(origin.service, origin.record(plan, names))
    return held_under(names, plan, origin.service, entry)


def respond(plan: GenerationPlan, service: Service, scope: Scope, origin: Origin) -> ASGIApp:
    """The response of a plan that goes on without its connection, or that retries can join."""
    attempt: Attempt | None = scope.get("podway.attempt")
    name, background = conversation_id(scope), plan.background
    names = [name] if name is not None and plan.is_stream else []
    if background is not None:
        names.append(background.response_id)
    if not plan.is_stream and background is None:
        group = ChoiceGroup(plan, service)
        abandon = partial(group.close, Abort.CLIENT_GONE)
        work = partial(service.group.leases.holding, partial(generate_body, plan, group))
        return Reply(plan.caller, work, abandon, service)
    stream = begin(plan, service, names, origin)
    former: FormerServer | None = scope.get("podway.former")
    if former is not None and name is not None:
        service.store.held.forgetting(former.delete(name))
    if not plan.is_stream:
        return AcceptedResponse(stream, plan, service)
    if attempt is not None:
        attempt.share(stream)
    return HeldResponse(stream, service, plan.caller)


def conversation_id(scope: Scope) -> str | None:
    """The header `x-conversation-id`. Raises `InvalidRequest`."""
    value = header_of(scope, CONVERSATION)
    if value is not None and valid_request_id(value) is None:
        raise InvalidRequest(
            "Invalid header 'x-conversation-id': expected 1 to 128 letters, digits or ._:/+=@#-",
            "x-conversation-id",
        )
    return value


def last_event(scope: Scope) -> int | None:
    """The header `last-event-id`. Raises `InvalidRequest`."""
    value = header_of(scope, LAST_EVENT)
    return None if value is None else event_number(value, "last-event-id")


def event_number(text: str, param: str) -> int:
    """A number of an event, or of a byte. Raises `InvalidRequest`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        raise invalid(param, "expected a whole number from 0.")
    return int(text)
