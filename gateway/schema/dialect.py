"""`ApiDialect`: what differs between the HTTP APIs besides the shapes of requests and responses.

One dialect, one folder: OpenAI's, its Responses API, and Anthropic's Messages API. The dialect of a
request follows from its path.
"""

from typing import Protocol

from gateway.schema.anthropic.dialect import AnthropicDialect
from gateway.schema.openai.dialect import OpenAIDialect
from gateway.schema.responses.dialect import ResponsesDialect


class ApiDialect(Protocol):
    """How one API reports errors, and which headers it adds to each response."""

    @property
    def request_id_header(self) -> str | None:
        """The header for the request's id, besides `x-request-id`."""
        ...

    def error_body(self, error: BaseException, request_id: str) -> bytes:
        """The JSON body of an error response."""
        ...

    def error_event(self, error: BaseException, request_id: str) -> bytes:
        """The last event of a stream that fails after its first event."""
        ...


OPENAI: ApiDialect = OpenAIDialect()
_BY_PATH: dict[str, ApiDialect] = {
    "/v1/messages": AnthropicDialect(),
    "/v1/responses": ResponsesDialect(),
}


def dialect_of(path: str) -> ApiDialect:
    """The dialect of the API that a URL path belongs to; OpenAI's for all other paths."""
    found = (dialect for prefix, dialect in _BY_PATH.items() if path.startswith(prefix))
    return next(found, OPENAI)
