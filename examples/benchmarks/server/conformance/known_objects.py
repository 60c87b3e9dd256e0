"""A pytest plugin for openai-python's tests, which are written for a server that invents answers.

The suite's own Python loads it (`-p known_objects`). It counts the requests of each test, as the
property "requests". With KNOWN_OBJECTS in the environment it replaces placeholders: an id such as
"batch_id" becomes that of an object that is made for the request, a request without `model` and
`input` gets both, and `limit` 0 and `after` "after" are left out.
"""

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

ASK = {"model": "gpt-5.4", "input": "Hello!"}
BACKGROUND = {**ASK, "background": True, "max_output_tokens": 500, "ignore_eos": True}
LINE = {
    "custom_id": "a", "method": "POST", "url": "/v1/embeddings",
    "body": {"model": "text-embedding-3-small", "input": "a"},
}  # fmt: skip
NO_VALUES = {"limit": 0, "after": "after"}


def made(path: str, body: bytes, media_type: str = "application/json") -> str:
    """The id of the object that the server makes."""
    headers = {"Content-Type": media_type, "Authorization": "Bearer My API Key"}
    url = os.environ["TEST_API_BASE_URL"] + path
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return str(json.load(answer)["id"])


def a_response(url: str, params: dict[str, Any]) -> str:
    """Only a response in the background can be cancelled, or read again as events."""
    needs_background = url.endswith("/cancel") or "stream" in params
    return made("/responses", json.dumps(BACKGROUND if needs_background else ASK).encode())


def a_file(url: str, params: dict[str, Any]) -> str:
    parts = 'name="purpose"\r\n\r\nbatch', f'name="file"; filename="a"\r\n\r\n{json.dumps(LINE)}\n'
    lines = [f"--x\r\nContent-Disposition: form-data; {part}\r\n" for part in parts]
    return made("/files", f"{''.join(lines)}--x--\r\n".encode(), "multipart/form-data; boundary=x")


def a_batch(url: str, params: dict[str, Any]) -> str:
    fields = {"input_file_id": a_file("", {}), "completion_window": "24h"}
    return made("/batches", json.dumps({**fields, "endpoint": LINE["url"]}).encode())


def a_conversation(url: str, params: dict[str, Any]) -> str:
    item = {"role": "user", "content": "Hello!", "id": "msg_abc"}  # the placeholder of an item
    return made("/conversations", json.dumps({"items": [item]}).encode())


MAKERS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "resp_677efb5139a88190b512bc3fef8e535d": a_response,
    "response_id": a_response,
    "batch_id": a_batch,
    "file_id": a_file,
    "conv_123": a_conversation,
}


def replace_placeholders(options: Any) -> None:
    """Change the options of a request to name objects that exist."""
    url, params = options.url.partition("?")[0], dict(options.params)
    for placeholder, make in MAKERS.items():
        if f"/{placeholder}" in url:
            options.url = options.url.replace(placeholder, make(url, params))
    options.params = {k: v for k, v in params.items() if NO_VALUES.get(k, ...) != v}
    body = options.json_data
    if isinstance(body, dict) and url in ("/responses", "/responses/input_tokens"):
        options.json_data = {**ASK, **body}
    if isinstance(body, dict) and "input_file_id" in body:
        known = {"input_file_id": a_file("", {}), "endpoint": LINE["url"]}
        options.json_data = {**body, **known}


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count the requests of a test that the server gets."""
    num_requests = 0

    def prepare(_: Any, options: Any) -> Any:
        nonlocal num_requests
        num_requests += 1
        if "KNOWN_OBJECTS" in os.environ:
            replace_placeholders(options)
        return options

    async def prepare_async(_: Any, options: Any) -> Any:
        return prepare(_, options)

    if "respx2_mock" not in request.fixturenames:
        monkeypatch.setattr(openai.OpenAI, "_prepare_options", prepare)
        monkeypatch.setattr(openai.AsyncOpenAI, "_prepare_options", prepare_async)
    yield
    request.node.user_properties.append(("requests", num_requests))
