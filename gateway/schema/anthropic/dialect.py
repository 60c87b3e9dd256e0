"""Anthropic's errors: `{"type": "error", "error": {type, message}, request_id}`."""

import orjson

from engine.errors import ContextTooLong
from gateway.errors import PromptTooLong, http_error, message_of
from gateway.schema.rendering import error_event

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}  # by status


class AnthropicDialect:
    """The dialect of `/v1/messages`; clients read the id of a request from `request-id`."""

    request_id_header: str | None = "request-id"

    def error_body(self, error: BaseException, request_id: str) -> bytes:
        status = http_error(error).status
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        detail = {"type": kind, "message": _length_message(error) or message_of(error)}
        return orjson.dumps({"type": "error", "error": detail, "request_id": request_id})

    def error_event(self, error: BaseException, request_id: str) -> bytes:
        return error_event(self.error_body(error, request_id))


def _length_message(error: BaseException) -> str:
    """The words from which clients of Anthropic's API read that they must compact the conversation
    or ask for fewer tokens, and how many; empty for other errors."""
    match error:
        case PromptTooLong(min_tokens=num_tokens, limit=limit):
            return f"prompt is too long: {num_tokens} tokens > {limit} maximum"
        case ContextTooLong(prompt_len=num_tokens, limit=limit) if error.is_prompt_too_long:
            return f"prompt is too long: {num_tokens} tokens > {limit} maximum"
        case ContextTooLong(prompt_len=num_tokens, max_tokens=max_tokens, limit=limit):
            return (
                f"input length and `max_tokens` exceed context limit: {num_tokens} + {max_tokens} "
                f"> {limit}, decrease input length or `max_tokens` and try again"
            )
    return ""
