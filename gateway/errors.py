"""The one table from what went wrong to what the client is told: status, type, code, body.

Errors of the engine come as they are; what only HTTP can get wrong is named here, in the same
tree. The JSON bodies are rendered by the API dialects (`gateway.schema.dialect`).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

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
    """The request names a model that is not served here."""

    def __init__(self, model: str, served: str) -> None:
        shown = model if len(model) <= 200 else model[:200] + "…"
        super().__init__(
            f"The model {shown!r} does not exist here; this server has {served!r}.", "model"
        )


class NotOfThisModel(InvalidRequest):
    """The endpoint is there, but the model that is served cannot do this."""


class PathNotFound(InvalidRequest):
    """No endpoint at this path."""


class MethodNotAllowed(InvalidRequest):
    """The endpoint is there, for the methods in `allow` (as the header spells them)."""

    def __init__(self, method: str, allow: str) -> None:
        super().__init__(f"Method {method} is not allowed here; allowed: {allow}.")
        self.allow = allow


class BodyTooLarge(InvalidRequest):
    """The body is longer than this server takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than {limit} bytes, the most taken here.")


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request body did not arrive within {seconds:g} seconds.")


class RequestNotFound(InvalidRequest):
    """No live request of this caller has that id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"No running request of yours has the id {request_id[:128]!r}.")


class FileNotFound(InvalidRequest):
    """The caller has no such file."""

    def __init__(self, file_id: str, param: str | None = None) -> None:
        super().__init__(f"No file of yours has the id {file_id[:128]!r}.", param)


class BatchNotFound(InvalidRequest):
    """The caller has no such batch."""

    def __init__(self, batch_id: str, param: str | None = None) -> None:
        super().__init__(f"No batch of yours has the id {batch_id[:128]!r}.", param)


class ResponseNotFound(InvalidRequest):
    """The caller has no such response, or it is not kept any more."""

    def __init__(self, response_id: str, param: str | None = None) -> None:
        super().__init__(f"No response of yours with the id {response_id[:128]!r} is kept.", param)


class StoreFull(InvalidRequest):
    """Everything that is kept takes all the room there is."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"All files together may have {limit} bytes here, and with this one they would have "
            "more. Delete some first.",
            "file",
        )


class TooManyBatches(InvalidRequest):
    """The caller's batches have to end before there can be more."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"You have {limit} batches that have not ended, and may have no more.")


class StoreFailed(EngineError):
    """The database that keeps files, batches and responses does not work."""


class WrongMediaType(InvalidRequest):
    """The body is not plain `application/json`."""


class InvalidApiKey(InvalidRequest):
    """No key, or one that this server does not know."""


class RateLimited(EngineError):
    """A limit of this key is reached; `headers` tell about all of its limits."""

    def __init__(self, message: str, retry_after: float, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = headers


class TooManyRequests(RateLimited):
    """Requests per minute."""


class TooManyAtOnce(RateLimited):
    """Requests that run at the same time."""


class TooManyTokens(RateLimited):
    """Tokens per minute."""


class Superseded(EngineError):
    """The caller has sent the same request again, and that one is served instead."""

    def __init__(self) -> None:
        super().__init__("This request was sent again, and the newer one is served instead.")


class Verdict(NamedTuple):
    """What an error looks like on the wire.

    `retry` goes into `x-should-retry`, where official clients would guess otherwise.
    """

    status: int
    type: str
    code: str
    retry: bool | None = None


_INVALID = "invalid_request_error"

TABLE: dict[type[EngineError], Verdict] = {
    InvalidRequest: Verdict(400, _INVALID, "invalid_request_error"),
    ContextTooLong: Verdict(400, _INVALID, "context_length_exceeded"),
    InvalidApiKey: Verdict(401, _INVALID, "invalid_api_key"),
    ModelNotFound: Verdict(404, _INVALID, "model_not_found"),
    NotOfThisModel: Verdict(400, _INVALID, "unsupported_model"),
    PathNotFound: Verdict(404, _INVALID, "not_found"),
    RequestNotFound: Verdict(404, _INVALID, "request_not_found"),
    FileNotFound: Verdict(404, _INVALID, "file_not_found"),
    ResponseNotFound: Verdict(404, _INVALID, "response_not_found"),
    BatchNotFound: Verdict(404, _INVALID, "batch_not_found"),
    MethodNotAllowed: Verdict(405, _INVALID, "method_not_allowed"),
    BodyTooSlow: Verdict(408, _INVALID, "request_timeout"),
    BodyTooLarge: Verdict(413, _INVALID, "request_too_large"),
    StoreFull: Verdict(413, _INVALID, "storage_full"),
    WrongMediaType: Verdict(415, _INVALID, "unsupported_media_type"),
    RequestCancelled: Verdict(499, _INVALID, "request_cancelled"),
    NoAllowedToken: Verdict(400, _INVALID, "nothing_allowed"),
    Superseded: Verdict(409, _INVALID, "superseded", retry=False),
    TooManyBatches: Verdict(429, "requests", "batch_limit_exceeded", retry=False),
    TooManyRequests: Verdict(429, "requests", "rate_limit_exceeded", retry=True),
    TooManyAtOnce: Verdict(429, "requests", "rate_limit_exceeded", retry=True),
    TooManyTokens: Verdict(429, "tokens", "rate_limit_exceeded", retry=True),
    Overloaded: Verdict(503, "server_error", "overloaded", retry=True),
    DeadlineUnmeetable: Verdict(503, "server_error", "deadline_unmeetable", retry=True),
    Unavailable: Verdict(503, "server_error", "unavailable", retry=True),
    RequestFailed: Verdict(500, "server_error", "internal_error", retry=True),
    # It was in the batch at every crash.
    WorkerLost: Verdict(500, "server_error", "internal_error", retry=False),
    DeadlineExceeded: Verdict(504, "server_error", "deadline_exceeded", retry=False),
    EngineError: Verdict(500, "server_error", "internal_error"),
}

_INTERNAL = Verdict(500, "server_error", "internal_error")
_OUR_FAULT = "The server had an error while it processed your request. Sorry; please try again."


def verdict(error: BaseException) -> Verdict:
    """Status, type and code of an error: its own row, or that of its nearest ancestor."""
    rows = (TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)
    return next(rows, _INTERNAL)


def message_of(error: BaseException) -> str:
    """What a client is told in words. What is our fault keeps its details for the log."""
    return _OUR_FAULT if verdict(error).status == 500 else str(error)


def error_headers(error: BaseException) -> dict[str, str]:
    """Headers that belong to this error besides the usual ones."""
    retry = verdict(error).retry
    headers = {} if retry is None else {"x-should-retry": "true" if retry else "false"}
    return headers | _own_headers(error)


def _own_headers(error: BaseException) -> dict[str, str]:
    if isinstance(error, RateLimited):
        return {**error.headers, **_retry_after(error.retry_after)}
    if isinstance(error, Overloaded | Unavailable) and error.retry_after is not None:
        return _retry_after(error.retry_after)
    if isinstance(error, MethodNotAllowed):
        return {"allow": error.allow}
    if isinstance(error, InvalidApiKey):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        return {"connection": "close"}  # the rest of the body is still on its way
    return {}


def _retry_after(seconds: float) -> dict[str, str]:
    seconds = max(0.001, seconds)
    whole, milliseconds = math.ceil(seconds), math.ceil(seconds * 1000)
    return {"retry-after": str(whole), "retry-after-ms": str(milliseconds)}
