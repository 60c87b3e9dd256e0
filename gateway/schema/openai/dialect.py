"""OpenAI's errors: `{"error": {message, type, param, code}}`, in bodies and in events."""

import orjson

from engine.errors import InvalidRequest
from gateway.errors import http_error, message_of
from gateway.schema.rendering import error_event


class OpenAIDialect:
    """The dialect of every path that is not another API's."""

    request_id_header: str | None = None

    def error_body(self, error: BaseException, request_id: str = "") -> bytes:
        return orjson.dumps({"error": error_fields(error)})

    def error_event(self, error: BaseException, request_id: str = "") -> bytes:
        return error_event(self.error_body(error), None)


def error_fields(error: BaseException) -> dict[str, str | None]:
    """The fields of OpenAI's `error` object; `param` names the invalid request field, if any."""
    row = http_error(error)
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"message": message_of(error), "type": row.type, "param": param, "code": row.code}
