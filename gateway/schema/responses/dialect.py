"""The Responses API's errors: OpenAI's bodies, and `error` events with a sequence number."""

import orjson

from gateway.schema.openai.dialect import OpenAIDialect, error_fields
from gateway.schema.rendering import error_event

# The number of the events sent before is not known here; this is larger than any.
LAST_SEQUENCE_NUMBER = 2**31 - 1


class ResponsesDialect(OpenAIDialect):
    """Differs from OpenAI's dialect in the error event only."""

    def error_event(self, error: BaseException, request_id: str = "") -> bytes:
        event = {"type": "error", "sequence_number": LAST_SEQUENCE_NUMBER}
        return error_event(orjson.dumps(error_fields(error) | event))
