"""Errors to HTTP: one table gives each error class its status, type and code.

Engine errors keep their classes; errors that only the HTTP API can have are defined here, in the
same tree. The API dialects (`gateway.schema.dialect`) render the JSON bodies.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from engine.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DeadlineUnmeetable,
    EngineError,
    InvalidRequest,
    NoAllowedToken,
    Overloaded,
    RequestCancelled,
    RequestFailed,
    Unavailable,
    WorkerLost,
)


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not serve."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        names = " and ".join(repr(name) for name in served)
        quoted = model if len(model) <= 200 else model[:200] + "…"
        super().__init__(
            f"The model {quoted!r} does not exist; this server serves {names}.", "model"
        )


class LoraNotFound(InvalidRequest):
    """No LoRA adapter with this name is loaded."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The LoRA adapter {name[:200]!r} is not loaded.", "lora_name")


class PromptTooLong(InvalidRequest):
    """A prompt exceeds the context; it was tokenized only until this was known."""

    def __init__(self, min_tokens: int, limit: int, param: str) -> None:
        self.min_tokens = min_tokens
        self.limit = limit
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, '{param}' has at "
            f"least {min_tokens} tokens. Please shorten it, or set 'truncate_prompt_tokens'.",
            param,
        )


class ConstraintFailed(InvalidRequest):
    """The grammar in this field allows no next token, or has reached the library's limits."""

    def __init__(self, param: str, error: NoAllowedToken) -> None:
        super().__init__(f"Invalid '{param}': {error}", param)


class UnsupportedByModel(InvalidRequest):
    """The endpoint exists, but the served model cannot do this."""


class PathNotFound(InvalidRequest):
    """No endpoint at this path."""


class MethodNotAllowed(InvalidRequest):
    """The endpoint exists for other methods: `allow`, as in the header of that name."""

    def __init__(self, method: str, allow: str) -> None:
        super().__init__(f"Method {method} is not allowed here; allowed: {allow}.")
        self.allow = allow


class BodyTooLarge(InvalidRequest):
    """The body is larger than the limit that this flag sets."""

    def __init__(self, limit: int, flag: str = "--max-body-bytes") -> None:
        advice = "Send less"
        if flag == "--max-body-bytes":
            advice = "Make images smaller, or upload files to /v1/files and send their ids"
        super().__init__(
            f"The request body is larger than the {limit:,} bytes that {flag} allows; it was not "
            f"read. {advice}."
        )


class TooManyValues(InvalidRequest):
    """Decoding the JSON body would block the event loop for too long."""

    def __init__(self, name: str, limit: int) -> None:
        """`name` says what was counted."""
        advice = " Send texts in UTF-8, unescaped." if name == "backslashes" else ""
        super().__init__(
            f"The request body has more than {limit} {name}, this server's limit on the work of "
            f"decoding it.{advice}"
        )


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request body did not arrive within {seconds:g} seconds.")


class RequestNotFound(InvalidRequest):
    """The caller has no running request with that id, or none that is remembered."""

    def __init__(self, request_id: str, *, num_ended: int = 0) -> None:
        """With `num_ended`, so many requests that have ended were looked at too."""
        ended = f", and none of the last {num_ended} that ended has it" if num_ended else ""
        super().__init__(f"You have no running request with the id {request_id[:128]!r}{ended}.")


class NotFound(InvalidRequest):
    """The caller has nothing of this kind with that id, or it has expired."""

    message: ClassVar[str]
    param_of_id: ClassVar[str | None] = None  # unless another is given

    def __init__(self, given: str, param: str | None = None) -> None:
        super().__init__(self.message.format(given[:128]), param or self.param_of_id)


class FileNotFound(NotFound):
    message = "You have no file with the id {!r}."


class BatchNotFound(NotFound):
    message = "You have no batch with the id {!r}."


class ResponseNotFound(NotFound):
    message = "You have no stored response with the id {!r}."


class StreamNotFound(NotFound):
    message = "You have no stream with the id {!r} whose events are held."


class EventsEvicted(InvalidRequest):
    """The ring of a stream no longer has the events that are to be read."""

    def __init__(self, oldest: int, offset: int) -> None:
        super().__init__(
            "The next events of this stream are not held any more. The oldest available event has "
            f"the id {oldest}, {offset} bytes from the start."
        )


class PreviousResponseNotFound(ResponseNotFound):
    """The response that a request continues is unknown. Clients send the whole input then."""

    param_of_id = "previous_response_id"


class ConversationNotFound(ResponseNotFound):
    message = "Conversation with id {!r} not found."
    param_of_id = "conversation"


class ItemNotFound(ResponseNotFound):
    message = "The conversation has no item {!r}."
    param_of_id = "item_id"


class ConversationLocked(InvalidRequest):
    """Another response to the same conversation is in progress."""

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"Another response to the conversation {conversation_id[:128]!r} is in progress; try "
            "again once it has ended.",
            "conversation",
        )


class UpgradeRequired(InvalidRequest):
    """The endpoint is a WebSocket. Clients use HTTP after this status."""


class StoreFull(InvalidRequest):
    """The caller's files and batches have reached their limit; `limit` says which."""

    def __init__(self, limit: str) -> None:
        super().__init__(
            f"Your files and batches have reached their limit of {limit}. Delete some files first.",
            "file",
        )


class TooManyBatches(InvalidRequest):
    """The caller has as many unfinished batches as allowed."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"You have {limit} unfinished batches, which is the limit.")


class StoreFailed(EngineError):
    """The database of files, batches and responses failed."""


class StoreOutOfSpace(StoreFailed):
    """The disk of the store is full or cannot be written, or the store has reached its limit."""

    def __init__(self) -> None:
        super().__init__(
            "The server has no space to store more files, batches or responses. What is stored can "
            "be read; responses with 'store': false are served."
        )


class WrongMediaType(InvalidRequest):
    """The body is not uncompressed `application/json` (or a form, for uploads)."""


class InvalidApiKey(InvalidRequest):
    """The API key is missing or unknown."""


class Forbidden(InvalidRequest):
    """The API key, or a client without one, may not use this endpoint."""


class RateLimited(EngineError):
    """A rate limit of the API key is reached; `headers` report all of its limits."""

    def __init__(self, message: str, retry_after: float, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = headers


class TooManyRequests(RateLimited):
    """The limit of requests per minute, or at once."""


class TooManyTokens(RateLimited):
    """The limit of tokens per minute."""


class Superseded(EngineError):
    """The client has retried this request, and the retry is served instead."""

    def __init__(self) -> None:
        super().__init__("This request was retried, and the retry is served instead.")


class TooManyMessages(EngineError):
    """A WebSocket has as many messages in progress as it may have."""

    def __init__(self, limit: str) -> None:
        super().__init__(f"{limit} on this connection, which is the limit.")


class HttpError(NamedTuple):
    """The HTTP form of an error class.

    `retry` sets the header `x-should-retry`, which official clients follow; None leaves it out.
    """

    status: int
    type: str
    code: str
    retry: bool | None = None


_INVALID = "invalid_request_error"

TABLE: dict[type[EngineError], HttpError] = {
    InvalidRequest: HttpError(400, _INVALID, "invalid_request_error"),
    ContextTooLong: HttpError(400, _INVALID, "context_length_exceeded"),
    PromptTooLong: HttpError(400, _INVALID, "context_length_exceeded"),
    InvalidApiKey: HttpError(401, _INVALID, "invalid_api_key"),
    Forbidden: HttpError(403, _INVALID, "permission_denied"),
    ModelNotFound: HttpError(404, _INVALID, "model_not_found"),
    LoraNotFound: HttpError(404, _INVALID, "lora_not_found"),
    UnsupportedByModel: HttpError(400, _INVALID, "unsupported_model"),
    PathNotFound: HttpError(404, _INVALID, "not_found"),
    RequestNotFound: HttpError(404, _INVALID, "request_not_found"),
    FileNotFound: HttpError(404, _INVALID, "file_not_found"),
    ResponseNotFound: HttpError(404, _INVALID, "response_not_found"),
    PreviousResponseNotFound: HttpError(400, _INVALID, "previous_response_not_found"),
    ConversationNotFound: HttpError(404, _INVALID, "conversation_not_found"),
    ItemNotFound: HttpError(404, _INVALID, "item_not_found"),
    ConversationLocked: HttpError(409, _INVALID, "conversation_locked"),
    UpgradeRequired: HttpError(426, _INVALID, "upgrade_required"),
    BatchNotFound: HttpError(404, _INVALID, "batch_not_found"),
    StreamNotFound: HttpError(404, _INVALID, "stream_not_found"),
    EventsEvicted: HttpError(410, _INVALID, "events_evicted", retry=False),
    MethodNotAllowed: HttpError(405, _INVALID, "method_not_allowed"),
    BodyTooSlow: HttpError(408, _INVALID, "request_timeout"),
    BodyTooLarge: HttpError(413, _INVALID, "request_too_large"),
    TooManyValues: HttpError(413, _INVALID, "request_too_large"),
    StoreFull: HttpError(413, _INVALID, "storage_full"),
    WrongMediaType: HttpError(415, _INVALID, "unsupported_media_type"),
    RequestCancelled: HttpError(499, _INVALID, "request_cancelled"),
    NoAllowedToken: HttpError(400, _INVALID, "nothing_allowed"),
    ConstraintFailed: HttpError(400, _INVALID, "nothing_allowed"),
    Superseded: HttpError(409, _INVALID, "superseded", retry=False),
    TooManyBatches: HttpError(429, "requests", "batch_limit_exceeded", retry=False),
    TooManyRequests: HttpError(429, "requests", "rate_limit_exceeded", retry=True),
    TooManyMessages: HttpError(429, "requests", "too_many_messages", retry=True),
    TooManyTokens: HttpError(429, "tokens", "rate_limit_exceeded", retry=True),
    Overloaded: HttpError(503, "server_error", "overloaded", retry=True),
    DeadlineUnmeetable: HttpError(503, "server_error", "deadline_unmeetable", retry=True),
    Unavailable: HttpError(503, "server_error", "unavailable", retry=True),
    RequestFailed: HttpError(500, "server_error", "internal_error", retry=True),
    # Not retried: the request was in the batch at every crash of the worker.
    WorkerLost: HttpError(500, "server_error", "internal_error", retry=False),
    DeadlineExceeded: HttpError(504, "server_error", "deadline_exceeded", retry=False),
    StoreOutOfSpace: HttpError(507, "server_error", "insufficient_storage", retry=False),
    EngineError: HttpError(500, "server_error", "internal_error"),
}

_INTERNAL = HttpError(500, "server_error", "internal_error")
_SERVER_ERROR = "The server had an error while processing your request. Please try again."


def http_error(error: BaseException) -> HttpError:
    """Status, type and code of an error: the row of its class or of the nearest base class."""
    rows = (TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)
    return next(rows, _INTERNAL)


def message_of(error: BaseException) -> str:
    """The message for the client. Details of internal errors go to the log only."""
    return _SERVER_ERROR if http_error(error).status == 500 else str(error)


def error_headers(error: BaseException) -> dict[str, str]:
    """The headers of this error, besides those of every response."""
    retry = http_error(error).retry
    headers = {} if retry is None else {"x-should-retry": "true" if retry else "false"}
    return headers | _own_headers(error)


def _own_headers(error: BaseException) -> dict[str, str]:
    if isinstance(error, RateLimited):
        return {**error.headers, **_retry_after(error.retry_after)}
    if isinstance(error, Overloaded | Unavailable) and error.retry_after is not None:
        return _retry_after(error.retry_after)
    if isinstance(error, MethodNotAllowed):
        return {"allow": error.allow}
    if isinstance(error, UpgradeRequired):
        return {"upgrade": "websocket"}
    if isinstance(error, InvalidApiKey):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        return {"connection": "close"}  # the rest of the body was not read
    return {}


def _retry_after(seconds: float) -> dict[str, str]:
    seconds = max(0.001, seconds)
    whole, milliseconds = math.ceil(seconds), math.ceil(seconds * 1000)
    return {"retry-after": str(whole), "retry-after-ms": str(milliseconds)}
