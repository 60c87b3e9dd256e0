"""Anthropic's shapes, as its official client declares them, as a judge of `/v1/messages`."""

from collections.abc import Iterator
from typing import Any

from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter, ValidationError

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_WHOLE: dict[str, type[BaseModel]] = {MESSAGES: Message, COUNT: MessageTokensCount}
_ERROR_FIELDS = {"type": str, "message": str}


def whole_complaints(path: str, status: int, body: Any) -> list[str]:
    """What is wrong with a JSON answer."""
    if status >= 400:
        return error_complaints(body)
    return _complaints(TypeAdapter(_WHOLE[path]), body)


def chunk_complaints(chunk: Any) -> list[str]:
    """What is wrong with the data of one event."""
    if chunk.get("type") == "ping":
        return [] if chunk == {"type": "ping"} else [f"a ping has nothing else: {chunk}"]
    return error_complaints(chunk) if chunk.get("type") == "error" else _complaints(_EVENT, chunk)


def error_complaints(body: Any) -> list[str]:
    """An error is `{"type": "error", "error": {type, message}, "request_id"}`."""
    error = body.get("error")
    is_right = (
        body.keys() <= {"type", "error", "request_id"}
        and body.get("type") == "error"
        and isinstance(error, dict)
        and error.keys() == _ERROR_FIELDS.keys()
        and all(isinstance(error[name], kind) for name, kind in _ERROR_FIELDS.items())
    )
    return [] if is_right else [f"not an error as Anthropic has them: {body}"]


def _complaints(adapter: TypeAdapter[Any], value: Any) -> list[str]:
    try:
        parsed = adapter.validate_python(value)
    except ValidationError as error:
        return [f"{error} ({value})"]
    return [f"{name} is not described ({value})" for name in _extra(parsed)]


def _extra(part: Any) -> Iterator[str]:
    """Fields that no class declares, at any depth."""
    if isinstance(part, BaseModel):
        yield from part.model_extra or ()
        for name in type(part).model_fields:
            yield from _extra(getattr(part, name))
    elif isinstance(part, list):
        for each in part:
            yield from _extra(each)
