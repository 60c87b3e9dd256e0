import json

import pytest

from engine.errors import InvalidRequest
from gateway.schema.decoding import quote
from gateway.web.table import ROUTES

ERROR = InvalidRequest("Invalid 'n'.", "n")
OPENAI_BODY = {
    "error": {
        "message": "Invalid 'n'.",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_request_error",
    }
}
ANTHROPIC_BODY = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "Invalid 'n'."},
    "request_id": "req_1",
}


def data_of(event: bytes) -> dict[str, object]:
    data: dict[str, object] = json.loads(event.partition(b"data: ")[2])
    return data


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/nowhere"])
def test_other_paths_have_openais_dialect(path: str) -> None:
    dialect = ROUTES.dialect_of(path)
    assert dialect.request_id_header is None
    assert json.loads(dialect.error_body(ERROR, "req_1")) == OPENAI_BODY
    event = dialect.error_event(ERROR, "req_1")
    assert data_of(event) == OPENAI_BODY
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")


def test_responses_have_openais_bodies_and_numbered_events() -> None:
    dialect = ROUTES.dialect_of("/v1/responses")
    assert json.loads(dialect.error_body(ERROR, "req_1")) == OPENAI_BODY
    event = dialect.error_event(ERROR, "req_1")
    assert event.startswith(b"event: error\n")
    assert data_of(event) == OPENAI_BODY["error"] | {"type": "error", "sequence_number": 2**31 - 1}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_messages_have_anthropics_bodies_events_and_request_id(path: str) -> None:
    dialect = ROUTES.dialect_of(path)
    assert dialect.request_id_header == "request-id"
    assert json.loads(dialect.error_body(ERROR, "req_1")) == ANTHROPIC_BODY
    assert data_of(dialect.error_event(ERROR, "req_1")) == ANTHROPIC_BODY


@pytest.mark.parametrize(("value", "said"), [(True, "true"), (False, "false"), (3, "3")])
def test_errors_repeat_a_value_in_jsons_words(value: object, said: str) -> None:
    assert quote(value) == said
