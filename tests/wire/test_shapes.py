from copy import deepcopy
from typing import Any

import pytest

from tests.wire.openai_shapes import chunk_complaints, complaints, shape_of, whole_complaints
from tests.wire.response_check import ResponseCheck

MODEL: dict[str, Any] = {"id": "x", "object": "model", "created": 1, "owned_by": "x"}
CHUNK: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "x",
    "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}],
    "usage": None,
}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "model": "x",
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        }
    ],
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [("Model", MODEL), ("CreateChatCompletionStreamResponse", CHUNK), ("Response", RESPONSE)],
)
def test_what_openai_describes_is_right(name: str, value: dict[str, Any]) -> None:
    assert complaints(name, value) == []


@pytest.mark.parametrize(
    "change",
    [{"id": 1}, {"object": "thing"}, {"created": True}, {"owned_by": None}, {"surprise": 1}],
)
def test_a_model_that_differs_is_wrong(change: dict[str, Any]) -> None:
    assert complaints("Model", MODEL | change)


def test_a_missing_field_is_wrong() -> None:
    assert complaints("Model", {"id": "x", "object": "model", "created": 1})


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lambda r: r, "extra"),
        (lambda r: r["output"][0], "extra"),
        (lambda r: r["output"][0]["content"][0], "extra"),
    ],
)
def test_an_unnamed_extension_is_wrong_at_any_depth(place: Any, name: str) -> None:
    response = deepcopy(RESPONSE)
    place(response)[name] = 1
    assert complaints("Response", response)


def test_an_unnamed_extension_of_a_delta_is_wrong_and_a_named_one_is_not() -> None:
    chunk = deepcopy(CHUNK)
    chunk["choices"][0]["delta"] = {"reasoning_content": "hm"}
    assert complaints("CreateChatCompletionStreamResponse", chunk) == []
    chunk["choices"][0]["delta"] = {"thoughts": "hm"}
    assert complaints("CreateChatCompletionStreamResponse", chunk)


def test_an_error_has_four_fields_and_may_end_a_stream() -> None:
    error = {"message": "x", "type": "y", "param": None, "code": None}
    path = "/v1/chat/completions"
    assert whole_complaints("POST", path, 400, {"error": error}) == []
    assert chunk_complaints("POST", path, {"error": error}) == []
    del error["param"]
    assert whole_complaints("POST", path, 400, {"error": error})
    assert chunk_complaints("POST", path, {"error": error})


def test_a_path_that_nobody_described_is_wrong_and_ours_are_not() -> None:
    assert shape_of("GET", "/v1/models/org/name") is not None
    assert shape_of("GET", "/v1/files/f/content") is not None
    assert whole_complaints("GET", "/health", 200, {"status": "ok"}) == []
    assert whole_complaints("POST", "/v1/surprise", 200, {})


def started(path: str, media_type: bytes, status: int = 200) -> ResponseCheck:
    check = ResponseCheck("POST", path)
    names = (b"x-request-id", b"openai-processing-ms", b"openai-version")
    headers = [(b"content-type", media_type), *((name, b"1") for name in names)]
    check.take({"type": "http.response.start", "status": status, "headers": headers})
    return check


@pytest.mark.parametrize(
    ("media_type", "status", "body"),
    [
        (b"text/plain", 400, b"no"),
        (b"application/json", 200, b"{"),
        (b"application/json", 200, b"{}"),
        (b"text/event-stream", 200, b"data: {}\n\n"),
        (b"text/event-stream", 200, b"data: {\n\n"),
        (b"text/event-stream", 200, b"data: [DONE]"),
    ],
)
def test_the_check_finds_what_is_wrong(media_type: bytes, status: int, body: bytes) -> None:
    check = started("/v1/completions", media_type, status)
    assert check.complaints == []
    check.take({"type": "http.response.body", "body": body})
    assert len(check.complaints) == 1 or b"{}" in body
    assert check.complaints


def test_the_check_finds_missing_headers_that_every_response_has() -> None:
    check = ResponseCheck("GET", "/health")
    check.take({"type": "http.response.start", "status": 200, "headers": []})
    assert len(check.complaints) == 3
