"""The plan of `POST /v1/responses`, and of a message of its WebSocket: what the model reads."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request as HttpRequest

from engine.errors import InvalidRequest
from gateway.access.bodies import read_body
from gateway.access.callers import Caller
from gateway.errors import ConversationNotFound, PreviousResponseNotFound, ResponseNotFound
from gateway.generation.continuation import OtherBeginningError, settings_of
from gateway.generation.conversation import render_prompt
from gateway.generation.image_prompt import ImageOrigin
from gateway.generation.plan import Background, GenerationPlan, plan_chat
from gateway.generation.prompt import TokenizedPrompts
from gateway.generation.threads import in_thread_if, read_body_with
from gateway.generation.turn import Turn
from gateway.schema.field_names import renamed_fields
from gateway.schema.openai.renderers import token_formatter
from gateway.schema.responses.diagnosis import CacheDiagnosis, NotCompared
from gateway.schema.responses.items import Item, check_outputs, distinct, stored_items
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
from gateway.schema.responses.window import Window
from gateway.service import Service, caller_of, service_of
from gateway.store.responses import Key
from gateway.store.running import RunningResponse
from gateway.web.routes.response_truncation import is_long_conversation, tokenize_truncated

Json = dict[str, Any]
Complete = Callable[[], Awaitable[None]]
# A prompt is computed up to this message where a WebSocket sends none yet.
NOTHING: Item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ""}]}


async def plan_response(body: bytes, caller: Caller, service: Service) -> GenerationPlan:
    """The plan of a request body, or of a message of a WebSocket if the caller has a turn.

    Raises `InvalidRequest` for what cannot be served.
    """
    turn = _turn_of(caller)
    request, tools, items = await read_body_with(partial(_read, body, caller, service), body)
    conversation = request.conversation_id
    continued = service.running.continued(conversation, caller.tenant)
    before = await _earlier_items(request, caller, service)
    check_outputs(before, items)
    window = None if turn is None else turn.window(items, service.model)
    new, items = items, before + items
    make = partial(_planned, _Parts(request, tools, items or [NOTHING]), caller, service, window)
    is_long = is_long_conversation(items if window is None else window.now, body)
    plan = await in_thread_if(is_long, make)
    if request.truncation == "auto":
        as_chat, fields = partial(request.as_chat, tools=tools), request.image_fields
        tokenize = partial(tokenize_truncated, as_chat, items, fields, plan, service)
        plan = replace(plan, tokenize=tokenize)
    renderer = plan.renderer
    assert isinstance(renderer, ResponsesRenderer), "made by _planned"
    options = request.prompt_cache_options
    if options is not None and (earlier := options.comparison_response_id) is not None:
        plan = await _compared(plan, earlier, request.instructions, items, service)
    running = RunningResponse(
        *(renderer.response_id, caller.request_id, caller.tenant, renderer.snapshot, continued)
    )
    last: list[Complete] = []
    if turn is not None:
        turn.renderer = renderer
        last.append(partial(_hold, turn, renderer, items, service))
    if conversation is not None:
        last.append(partial(_append, conversation, new, renderer, caller, service))
    background = None
    if request.is_stored or conversation is not None:
        await service.store.database.check_writable()
    if request.is_stored:
        store = partial(_store, renderer, items, caller, service)
        last.append(store)
        background = _background(renderer, store) if request.background else None
    listed = partial(service.running.register, running)
    return replace(plan, listed=listed, on_complete=partial(_in_order, last), background=background)


async def _compared(
    plan: GenerationPlan,
    earlier_id: str,
    instructions: str | None,
    items: list[Item],
    service: Service,
) -> GenerationPlan:
    """The plan of a response whose prompt is compared with that of an earlier one."""
    renderer = plan.renderer
    assert isinstance(renderer, ResponsesRenderer), "made by _planned"
    try:
        key = Key(earlier_id, plan.caller.tenant, service.unix_now())
        earlier, before = await service.store.responses.whole(key)
    except ResponseNotFound:
        renderer.diagnosis = NotCompared()
        return plan
    head = renderer.snapshot()

    def compare() -> CacheDiagnosis:
        messages = messages_of(earlier["instructions"], before)
        return CacheDiagnosis.of(earlier, head, messages, messages_of(instructions, items))

    diagnosis = await in_thread_if(is_long_conversation(items, b""), compare)

    async def tokenize() -> TokenizedPrompts:
        tokenized = await plan.tokenize()
        diagnosis.note(tokenized.marks.message_ends)
        return tokenized

    renderer.diagnosis = diagnosis
    return replace(plan, tokenize=tokenize)


def _turn_of(caller: Caller) -> Turn | None:
    return caller.turn if isinstance(caller.turn, Turn) else None


async def _in_order(last: Sequence[Complete]) -> None:
    for each in last:
        await each()


def _background(renderer: ResponsesRenderer, store: Callable[[], Awaitable[None]]) -> Background:
    def snapshot() -> bytes:
        return orjson.dumps(renderer.snapshot())

    return Background(renderer.response_id, renderer.accepted, snapshot, store)


class _Parts(NamedTuple):
    """A request with its tools and the items of its `input`."""

    request: ResponseRequest
    tools: ToolSet
    items: list[Item]


def _read(body: bytes, caller: Caller, service: Service) -> _Parts:
    is_message = caller.turn is not None
    request = decode_response(body, caller.unknown_fields, is_message=is_message)
    service.check_generates(request.model)
    assert request.input is not None, "checked by decode_response"
    tools = read_tools(request.tools or (), caller.unknown_fields)
    if isinstance(request, ResponseCreate) and request.generate is False and not request.input:
        return _Parts(request, tools, [])
    return _Parts(request, tools, stored_items(request.input, service.new_id))


def _planned(
    parts: _Parts, caller: Caller, service: Service, window: Window | None = None
) -> GenerationPlan:
    request, tools, items = parts
    turn = _turn_of(caller)
    model = service.model
    chat = request.as_chat(items if window is None else window.now, tools)
    if turn is not None:
        turn.settings = settings_of(chat, request.instructions)
        if window is not None and turn.may_follow(chat, model):
            turn.follow(request.as_chat(window.earlier, tools), model)
        elif window is not None:
            chat = request.as_chat(items, tools)
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
    if turn is not None and turn.continuation is not None:
        plan = replace(plan, tokenize=partial(_tokenize_turn, plan, parts, service))
    constraint = None if plan.constraint is None else plan.constraint.renamed(NAMES)
    return replace(plan, prompt_field="input", constraint=constraint)


async def _tokenize_turn(plan: GenerationPlan, parts: _Parts, service: Service) -> TokenizedPrompts:
    """The prompt of the plan, which has a window of a conversation; if it does not show the prompt
    of the whole conversation, that is rendered."""
    try:
        return await plan.tokenize()
    except (OtherBeginningError, InvalidRequest):
        assert plan.turn is not None, "only turns have windows"
        plan.turn.continuation = None
    request, tools, items = parts

    def whole() -> GenerationPlan:
        chat = request.as_chat(items, tools)
        with renamed_fields(NAMES):
            return plan_chat(chat, plan.renderer, plan.caller, service, plan.turn)

    planned = await in_thread_if(is_long_conversation(items, b""), whole)
    return await planned.tokenize()


async def count_input_tokens(http: HttpRequest) -> Json:
    """The number of tokens of a request's prompt; nothing is generated."""
    service, caller = service_of(http), caller_of(http)
    body = await read_body(http, service.limits)
    request, tools, items = await read_body_with(partial(_read, body, caller, service), body)
    service.running.continued(request.conversation_id, caller.tenant)
    items = await _earlier_items(request, caller, service) + items
    is_long = is_long_conversation(items, body)
    chat = await in_thread_if(is_long, partial(request.as_chat, items, tools))
    with renamed_fields(NAMES):
        origin = ImageOrigin(service.image_sender(caller), request.image_fields)
        rendered = await render_prompt(service.model, chat, origin)
    return {"object": "response.input_tokens", "input_tokens": len(rendered.ids)}


async def _earlier_items(request: ResponseRequest, caller: Caller, service: Service) -> list[Item]:
    """The items of the conversation up to and including the response that the request continues."""
    if (conversation := request.conversation_id) is not None:
        key = Key(conversation, caller.tenant, service.unix_now())
        return await service.store.conversations.items(key)
    response_id = request.previous_response_id
    if response_id is None:
        return []
    turn = _turn_of(caller)
    if turn is not None and (held := turn.continues(response_id)) is not None:
        return held
    try:
        key = Key(response_id, caller.tenant, service.unix_now())
        return (await service.store.responses.whole(key)).turns
    except ResponseNotFound as error:
        raise PreviousResponseNotFound(response_id) from error


async def _hold(
    turn: Turn, renderer: ResponsesRenderer, items: list[Item], service: Service
) -> None:
    """Let the connection's next messages continue the response."""
    make = partial(turn.to_hold, items, renderer.output.items, service.model)
    is_long = is_long_conversation(items, b"")
    turn.hold(renderer.response_id, await in_thread_if(is_long, make))


async def _append(
    conversation: str,
    items: list[Item],
    renderer: ResponsesRenderer,
    caller: Caller,
    service: Service,
) -> None:
    """Add the input and the output of a response to its conversation, unless that was deleted."""
    key = Key(conversation, caller.tenant, service.unix_now())
    output, renamed = renderer.output.items, partial(distinct, new_id=service.new_id)
    with suppress(ConversationNotFound):
        await service.store.conversations.add_turn(key, items, output, renamed)


async def _store(
    renderer: ResponsesRenderer, items: list[Item], caller: Caller, service: Service
) -> None:
    key = Key(renderer.response_id, caller.tenant, service.unix_now())
    await service.store.responses.put(key, renderer.snapshot(), items)
