"""`ApiDialect`: what differs between the HTTP APIs besides the shapes of requests and responses.

One dialect, one folder: OpenAI's, its Responses API, and Anthropic's Messages API. The table of
routes says which dialect a path has.
"""

from typing import Protocol

from gateway.schema.openai.dialect import OpenAIDialect


class ApiDialect(Protocol):
    """How one API reports errors, and which headers it adds to each response."""

    @property
    def request_id_header(self) -> str | None:
        """The header for the request's id, besides `x-request-id`."""

    def error_body(self, error: BaseException, request_id: str) -> bytes:
        """The JSON body of an error response."""

    def error_event(self, error: BaseException, request_id: str) -> bytes:
        """The last event of a stream that fails after its first event."""


OPENAI: ApiDialect = OpenAIDialect()
