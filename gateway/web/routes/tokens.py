"""`POST /tokenize` and `POST /detokenize`: text to ids and back, without generating anything."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from gateway.access.bodies import read_body
from gateway.generation.conversation import render_prompt
from gateway.generation.image_prompt import ImageOrigin
from gateway.generation.prompt import fits_on_loop, token_ids, tokenize_prompts
from gateway.generation.reply import unless_disconnected
from gateway.generation.threads import read_body_with, run_in_thread
from gateway.ports import Tokenizer
from gateway.schema.decoding import decode, decode_checked
from gateway.schema.openai.chat import ChatRequest
from gateway.schema.openai.tokens import DetokenizeRequest, TokenizeRequest
from gateway.service import Service, caller_of, service_of
from gateway.web.route import decoded_body

T = TypeVar("T")
IDS_AT_ONCE = 16_384  # rendered as JSON in 0.1 ms
IDS_PER_PART = 8  # decoding 8 ids takes about as long as encoding one short text


async def tokenize(http: HttpRequest) -> bytes:
    """The ids of a prompt or of a conversation; raises `InvalidRequest`."""
    service, caller = service_of(http), caller_of(http)
    raw = await read_body(http, service.limits)
    read = partial(decode_checked, TokenizeRequest, raw, caller.unknown_fields)
    request = await read_body_with(read, raw)
    if request.model is not None:
        service.check_model(request.model)
    chat = None
    if request.messages is not None:
        chat = await read_body_with(partial(request.as_chat, service.model.name), raw)
    origin = ImageOrigin(service.image_sender(caller))
    ids = await unless_disconnected(
        http.receive, partial(_ids, request, chat, origin, service), lambda: None
    )
    if ids is None:
        raise ClientDisconnect
    max_model_len = service.engine.scheduler.max_request_len
    tokenizer = service.model.tokenizer if request.return_token_strs else None
    return await _off_loop(ids, lambda: _body(ids, max_model_len, tokenizer))


async def detokenize(http: HttpRequest) -> dict[str, str]:
    """The text of ids, control tokens included; raises `InvalidRequest`."""
    service = service_of(http)

    def read(body: bytes) -> DetokenizeRequest:
        request = decode(DetokenizeRequest, body)
        request.check(service.model.vocabulary)
        return request

    request = await decoded_body(http, read)
    if request.model is not None:
        service.check_model(request.model)
    ids, tokenizer = request.tokens, service.model.tokenizer
    return {"prompt": await _off_loop(ids, lambda: _text(tokenizer, ids))}


async def _ids(
    request: TokenizeRequest, chat: ChatRequest | None, origin: ImageOrigin, service: Service
) -> Sequence[int]:
    tokenizer = service.model.tokenizer
    if chat is not None:
        rendered = await render_prompt(service.model, chat, origin)
        text, ids = rendered.text, rendered.ids
        if rendered.media or not request.add_special_tokens:
            return ids
    elif request.prompt is not None and request.add_special_tokens is not False:
        return (await tokenize_prompts(tokenizer, [request.prompt])).prompts[0]
    else:
        text = request.prompt or ""
    is_special = bool(request.add_special_tokens)

    def tokenize() -> Sequence[int]:
        return token_ids(tokenizer, text, "prompt", add_special_tokens=is_special)

    return tokenize() if fits_on_loop([text], 1) else await run_in_thread(tokenize)


async def _off_loop(ids: Sequence[int], decode: Callable[[], T]) -> T:
    """The result of `decode`, which runs in a thread if there are many ids."""
    num_parts = len(ids) // IDS_PER_PART
    return decode() if fits_on_loop((), num_parts) else await run_in_thread(decode)


def _body(ids: Sequence[int], max_model_len: int, tokenizer: Tokenizer | None) -> bytes:
    """The response to `/tokenize`; it has the tokens' texts if there is a tokenizer.

    It is rendered part by part, since another thread gets the interpreter's lock only between.
    """
    tokens, texts = [], []
    for start in range(0, len(ids), IDS_AT_ONCE):
        part = ids[start : start + IDS_AT_ONCE]
        tokens.append(orjson.dumps(part)[1:-1])
        if tokenizer is not None:
            texts.append(orjson.dumps([_token_text(tokenizer, i) for i in part])[1:-1])
    strs = b"null" if tokenizer is None else b"[" + b",".join(texts) + b"]"
    head = b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(ids), max_model_len)
    return head + b",".join(tokens) + b'],"token_strs":' + strs + b"}"


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decoded as outputs are, but with control tokens."""
    feed, special = tokenizer.decoder().feed, tokenizer.special_ids
    text = bytearray()
    for token_id in ids:  # piece by piece, so that other threads run meanwhile
        text += tokenizer.token_bytes(token_id) if token_id in special else feed(token_id)
    return text.decode(errors="replace")
