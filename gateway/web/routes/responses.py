"""`/v1/responses`: outputs as items, stored so that a later request can continue from them."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from engine.errors import ContextTooLong, InvalidRequest
from gateway.access.callers import read_body
from gateway.errors import PreviousResponseNotFound, ResponseNotFound, StreamNotFound
from gateway.generation.conversation import render_prompt
from gateway.generation.held_streams import event_number, held_stream
from gateway.generation.image_input import ImageOrigin
from gateway.generation.plan import Background, GenerationPlan, plan_chat
from gateway.generation.threads import MAX_BYTES_ON_LOOP, in_thread_if, read_body_with
from gateway.generation.turn import Turn
from gateway.schema.field_names import renamed_fields
from gateway.schema.openai.event_envelope import token_formatter
from gateway.schema.paging import list_json, read_page
from gateway.schema.responses.diagnosis import CacheDiagnosis, NotCompared
from gateway.schema.responses.items import Item, stored_items
from gateway.schema.responses.renderer import PrefillRenderer, ResponsesRenderer
from gateway.schema.responses.request import (
    NAMES,
    ResponseCreate,
    ResponseRequest,
    decode_response,
    messages_of,
    response_head,
)
from gateway.schema.responses.tools import ToolSet, read_tools
from gateway.service import caller_of, service_of
from gateway.store.responses import ResponseRecord
from gateway.store.running import RunningResponse

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp

    from gateway.access.callers import Caller
    from gateway.generation.prompt import TokenizedPrompts
    from gateway.schema.openai.chat import ChatRequest
    from gateway.service import Service

Json = dict[str, Any]
Complete = Callable[[], Awaitable[None]]
# A prompt is computed up to this message where a WebSocket sends none yet.
NOTHING: Item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ""}]}
DEFAULT_LISTED, MAX_LISTED = 20, 100
MAX_ITEMS_ON_LOOP = 64


async def plan_response(body: bytes, caller: "Caller", service: "Service") -> GenerationPlan:
    """The plan of a request body, or of a message of a WebSocket if the caller has a turn.

    Raises `InvalidRequest` for what cannot be served.
    """
    turn = _turn_of(caller)
    request, tools, items = await read_body_with(partial(_read, body, caller, service), body)
    items = await _earlier_items(request, caller, service) + items
    make = partial(_planned, _Parts(request, tools, items or [NOTHING]), caller, service)
    plan = await in_thread_if(_is_long(items, body), make)
    if request.truncation == "auto":
        as_chat, fields = partial(request.as_chat, tools=tools), request.image_fields
        tokenize = partial(_tokenize_truncated, as_chat, items, fields, plan, service)
        plan = replace(plan, tokenize=tokenize)
    renderer = plan.renderer
    assert isinstance(renderer, ResponsesRenderer), "made by _planned"
    options = request.prompt_cache_options
    if options is not None and (earlier := options.comparison_response_id) is not None:
        plan = await _compared(plan, earlier, request.instructions, items, service)
    running = RunningResponse(
        renderer.response_id, caller.request_id, caller.tenant, renderer.snapshot
    )
    plan = replace(plan, listed=partial(service.running.register, running))
    if request.is_stored:
        await service.store.responses.check_room()
        store = partial(_store, renderer, items, caller, service)
        plan = replace(plan, on_complete=store)
        if request.background:
            plan = replace(plan, background=_background(renderer, store))
    if turn is not None:
        turn.renderer = renderer
        keep = partial(_hold, turn, renderer, items, caller, service)
        plan = replace(plan, on_complete=partial(_in_order, keep, plan.on_complete))
    return plan


async def _compared(
    plan: GenerationPlan,
    earlier_id: str,
    instructions: str | None,
    items: list[Item],
    service: "Service",
) -> GenerationPlan:
    """The plan of a response whose prompt is compared with that of an earlier one."""
    renderer = plan.renderer
    assert isinstance(renderer, ResponsesRenderer), "made by _planned"
    try:
        record = await service.store.responses.find(
            earlier_id, plan.caller.tenant, service.unix_now()
        )
    except ResponseNotFound:
        renderer.diagnosis = NotCompared()
        return plan
    earlier, head = record.response, renderer.snapshot()

    def compare() -> CacheDiagnosis:
        before = messages_of(earlier["instructions"], record.items)
        return CacheDiagnosis.of(earlier, head, before, messages_of(instructions, items))

    diagnosis = await in_thread_if(_is_long(items, b""), compare)

    async def tokenize() -> "TokenizedPrompts":
        tokenized = await plan.tokenize()
        diagnosis.note(tokenized.marks.message_ends)
        return tokenized

    renderer.diagnosis = diagnosis
    return replace(plan, tokenize=tokenize)


def _turn_of(caller: "Caller") -> Turn | None:
    return caller.turn if isinstance(caller.turn, Turn) else None


async def _in_order(first: Complete, second: Complete | None) -> None:
    await first()
    if second is not None:
        await second()


def _background(renderer: ResponsesRenderer, store: Callable[[], Awaitable[None]]) -> Background:
    def snapshot() -> bytes:
        return orjson.dumps(renderer.snapshot())

    return Background(renderer.response_id, renderer.accepted, snapshot, store)


class _Parts(NamedTuple):
    """A request with its tools and the items of its `input`."""

    request: ResponseRequest
    tools: ToolSet
    items: list[Item]


def _read(body: bytes, caller: "Caller", service: "Service") -> _Parts:
    is_message = caller.turn is not None
    request = decode_response(body, caller.unknown_fields, is_message=is_message)
    service.check_generates(request.model)
    assert request.input is not None, "checked by decode_response"
    tools = read_tools(request.tools or (), caller.unknown_fields)
    if isinstance(request, ResponseCreate) and request.generate is False and not request.input:
        return _Parts(request, tools, [])
    return _Parts(request, tools, stored_items(request.input, service.new_id))


def _planned(parts: _Parts, caller: "Caller", service: "Service") -> GenerationPlan:
    request, tools, items = parts
    turn = _turn_of(caller)
    chat = request.as_chat(items, tools)
    model = service.model
    options = request.prompt_cache_options
    is_prefill = bool(options and options.prewarm) or not (turn is None or turn.generates)
    kind = PrefillRenderer if is_prefill else ResponsesRenderer
    renderer = kind(
        response_head(
            request, tools, service.new_id("resp_"), service.unix_now(), model.sampling_defaults
        ),
        service.new_id,
        service.unix_now,
        token_formatter(chat.report_options, model.tokenizer),
        tools.by_function,
    )
    with renamed_fields(NAMES):
        plan = plan_chat(chat, renderer, caller, service, turn, request.image_fields)
    return replace(plan, prompt_field="input")


async def count_input_tokens(http: "HttpRequest") -> Json:
    """The number of tokens of a request's prompt; nothing is generated."""
    service, caller = service_of(http), caller_of(http)
    body = await read_body(http, service.limits)
    request, tools, items = await read_body_with(partial(_read, body, caller, service), body)
    items = await _earlier_items(request, caller, service) + items
    chat = await in_thread_if(_is_long(items, body), partial(request.as_chat, items, tools))
    with renamed_fields(NAMES):
        origin = ImageOrigin(service.image_sender(caller), request.image_fields)
        rendered = await render_prompt(service.model, chat, origin)
    return {"object": "response.input_tokens", "input_tokens": len(rendered.ids)}


async def compact_response(http: "HttpRequest") -> Json:
    """Rejected: only OpenAI's models make the opaque items that replace a conversation."""
    raise InvalidRequest(
        "Compaction is not supported. Send fewer items, or set 'truncation' to 'auto', which "
        "leaves out the oldest."
    )


async def _earlier_items(
    request: ResponseRequest, caller: "Caller", service: "Service"
) -> list[Item]:
    """The items of the conversation up to and including the response that the request continues."""
    response_id = request.previous_response_id
    if response_id is None:
        return []
    turn = _turn_of(caller)
    if turn is not None and (held := turn.continues(response_id)) is not None:
        return held
    responses = service.store.responses
    try:
        record = await responses.find(response_id, caller.tenant, service.unix_now())
    except ResponseNotFound as error:
        raise PreviousResponseNotFound(response_id) from error
    return record.turns


async def _tokenize_truncated(
    as_chat: "Callable[[list[Item]], ChatRequest]",
    items: list[Item],
    fields: Sequence[str],
    plan: GenerationPlan,
    service: "Service",
) -> "TokenizedPrompts":
    """The prompt without the oldest items, as few of them as needed (binary search)."""
    is_long = _is_long(items, b"")
    starts = await in_thread_if(is_long, partial(_starts, items))

    def plan_from(start: int) -> GenerationPlan:
        chat = as_chat(_suffix(items, start))
        return plan_chat(chat, plan.renderer, plan.caller, service, image_fields=fields)

    async def tokenize(number: int) -> "TokenizedPrompts":
        make = partial(plan_from, starts[number])
        cut = await in_thread_if(is_long, make)
        return await cut.tokenize()

    def fits(tokenized: "TokenizedPrompts") -> bool:
        return _fits(plan.limits.max_tokens, len(tokenized.prompts[0]), service)

    best = await plan.tokenize()
    low, high = (len(starts), 0) if fits(best) else (1, len(starts) - 1)
    while low <= high:
        middle = (low + high) // 2
        tokenized = await tokenize(middle)
        if fits(tokenized):
            best, high = tokenized, middle - 1
        else:
            low = middle + 1
    return best  # if nothing fits, `request_specs` rejects its length


def _is_long(items: Sequence[Item], body: bytes) -> bool:
    """Whether a conversation is converted in a thread. Items of earlier responses count too."""
    return len(items) > MAX_ITEMS_ON_LOOP or len(body) > MAX_BYTES_ON_LOOP


def _starts(items: Sequence[Item]) -> list[int]:
    """Where a shortened conversation may begin: at its first item, and at each user's message."""
    return [0, *(at for at, item in enumerate(items) if at and item.get("role") == "user")]


def _suffix(items: Sequence[Item], start: int) -> list[Item]:
    """The items from a user's message on, after all system items before it."""
    system = [item for item in items[:start] if item.get("role") in ("system", "developer")]
    return [*system, *items[start:]]


def _fits(max_tokens: int | None, prompt_len: int, service: "Service") -> bool:
    try:
        service.engine.check_fits(prompt_len, max_tokens or 1)
    except ContextTooLong:
        return False
    return True


async def _hold(
    turn: Turn,
    renderer: ResponsesRenderer,
    items: list[Item],
    caller: "Caller",
    service: "Service",
) -> None:
    """Let the connection's next messages continue the response."""
    make = partial(turn.to_hold, [*items, *renderer.output], service.model)
    turn.hold(renderer.response_id, await in_thread_if(_is_long(items, b""), make))


async def _store(
    renderer: ResponsesRenderer, items: list[Item], caller: "Caller", service: "Service"
) -> None:
    record = ResponseRecord(renderer.response_id, caller.tenant, renderer.snapshot(), items)
    await service.store.responses.put(record, service.unix_now())


async def retrieve_response(http: "HttpRequest") -> "ASGIApp | Json":
    """A stored response, or one in the background as it is now; with `stream`, its events after
    number `starting_after`. Raises `ResponseNotFound`."""
    service, caller = service_of(http), caller_of(http)
    response_id = http.path_params["response_id"]
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        return await _events(http)
    with suppress(StreamNotFound):
        group = held_stream(response_id, caller, service).group
        running = service.running.find(response_id, caller.tenant)
        if group is not None and running is not None:
            is_queued = running.snapshot()["status"] == "queued"
            return running.snapshot("in_progress" if is_queued and group.has_started else None)
    record = await _find(http)
    return record.response


async def _events(http: "HttpRequest") -> "ASGIApp":
    """The events of a response in the background."""
    service, caller = service_of(http), caller_of(http)
    text = http.query_params.get("starting_after")
    after = -1 if text is None else event_number(text, "starting_after")
    try:
        stream = held_stream(http.path_params["response_id"], caller, service)
    except StreamNotFound:
        await _find(http)
        raise InvalidRequest(
            "The events of this response are not held: it was made without 'background', or it "
            "ended too long ago. It can be read without 'stream'.",
            "stream",
        ) from None
    return stream.response(caller, after)


async def delete_response(http: "HttpRequest") -> Json:
    """Delete a stored response; raises `ResponseNotFound`."""
    service, caller = service_of(http), caller_of(http)
    response_id = http.path_params["response_id"]
    if await _end_background(response_id, caller, service):
        with suppress(ResponseNotFound):  # it was rejected
            await service.store.responses.delete(response_id, caller.tenant, service.unix_now())
    else:
        await service.store.responses.delete(response_id, caller.tenant, service.unix_now())
    return {"id": response_id, "object": "response", "deleted": True}


async def _end_background(response_id: str, caller: "Caller", service: "Service") -> bool:
    """End a response in the background, and forget its events; False if there is none."""
    try:
        stream = held_stream(response_id, caller, service)
    except StreamNotFound:
        return False
    service.store.held.delete(caller.tenant, response_id)
    await stream.forget()
    return True


async def cancel_response(http: "HttpRequest") -> Json:
    """End a response in progress.

    Raises `ResponseNotFound`, or `InvalidRequest` for a response that has ended.
    """
    service, caller = service_of(http), caller_of(http)
    response_id = http.path_params["response_id"]
    running = service.running.find(response_id, caller.tenant)
    if running is None or not service.groups.cancel(running.request_id, caller.tenant):
        record = await _find(http)
        status = record.response["status"]
        if status == "cancelled" and record.response["background"]:
            return record.response  # cancelling again has no effect
        raise InvalidRequest(f"This response cannot be cancelled: it is {status}.", "response_id")
    return running.snapshot("cancelled")


async def list_input_items(http: "HttpRequest") -> Json:
    """A page of the items of the prompt, newest first by default."""
    page = read_page(http.query_params, default=DEFAULT_LISTED, most=MAX_LISTED)
    record = await _find(http)
    items = record.items if page.is_ascending else record.items[::-1]
    if page.after is not None:
        ids = [item["id"] for item in items]
        if page.after not in ids:
            raise InvalidRequest(f"Invalid 'after': no item {page.after[:100]!r}.", "after")
        items = items[ids.index(page.after) + 1 :]
    return list_json(items[: page.limit], has_more=len(items) > page.limit)


async def _find(http: "HttpRequest") -> ResponseRecord:
    service, caller = service_of(http), caller_of(http)
    response_id = http.path_params["response_id"]
    return await service.store.responses.find(response_id, caller.tenant, service.unix_now())
