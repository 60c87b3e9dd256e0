"""`max_tokens` is an upper bound in chat dialects; a prompt that is too long is refused in the
words of each API."""

from typing import Any

import pytest

from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, CONTEXT, MODEL, TEXT, Rig, Setting, chat, played, text

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HEADER = "x-podway-max-tokens"
LONG_ANSWER = Setting(texts=("a" * 400,))
STRICT = Setting(is_strict_about_max_tokens=True)
TEMPLATE = 6  # tokens that the chat template adds to a user's text


def body(path: str, content: str, max_tokens: int) -> dict[str, Any]:
    """A request of the path's API."""
    messages = [{"role": "user", "content": content}]
    match path:
        case "/v1/messages":
            return {"model": MODEL, "messages": messages, "max_tokens": max_tokens}
        case "/v1/responses":
            return {"model": MODEL, "input": content, "max_output_tokens": max_tokens}
        case "/v1/chat/completions":
            return chat(messages=messages, max_tokens=max_tokens, max_completion_tokens=None)
    return text(prompt=content, max_tokens=max_tokens)


def finish(path: str, result: dict[str, Any]) -> str:
    """Why the answer ended, in the words of the path's API."""
    match path:
        case "/v1/messages":
            return str(result["stop_reason"])
        case "/v1/responses":
            return str(result["incomplete_details"]["reason"])
    return str(result["choices"][0]["finish_reason"])


@pytest.mark.parametrize(
    ("path", "reason", "counted"),
    [
        (CHAT, "length", "completion_tokens"),
        (RESPONSES, "max_output_tokens", "output_tokens"),
        (MESSAGES, "max_tokens", "output_tokens"),
    ],
)
def test_the_output_ends_with_the_context_if_max_tokens_exceeds_it(
    path: str, reason: str, counted: str
) -> None:
    answer = answer_to(path, body(path, "hi", 32_000), LONG_ANSWER)
    result = answer.json
    room = CONTEXT - TEMPLATE - len("hi")
    assert answer.status == 200, result
    assert finish(path, result) == reason
    assert answer.headers[HEADER] == str(room)
    assert result["usage"][counted] == room


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@played()
async def test_a_bound_that_the_context_has_room_for_is_not_reported(rig: Rig, path: str) -> None:
    exchange = await rig.client.post(path, body(path, "hi", CONTEXT - TEMPLATE - 2))
    assert exchange.status == 200
    assert HEADER not in exchange.headers


@pytest.mark.parametrize(
    ("path", "setting"),
    [(TEXT, Setting()), (TEXT, STRICT), (CHAT, STRICT), (RESPONSES, STRICT), (MESSAGES, STRICT)],
)
def test_completions_and_a_strict_server_reject_a_bound_that_does_not_fit(
    path: str, setting: Setting
) -> None:
    answer = answer_to(path, body(path, "hi", 32_000), setting)
    error = answer.json["error"]
    assert answer.status == 400
    assert "32000" in error["message"]
    num_tokens = 2 if path == TEXT else TEMPLATE + 2
    if path == MESSAGES:
        expected = f"exceed context limit: {num_tokens} + 32000 > {CONTEXT}"
    else:
        expected = f"({num_tokens} in the prompt, 32000 in the completion)"
    assert expected in error["message"]


@pytest.mark.parametrize("setting", [Setting(), STRICT])
@pytest.mark.parametrize("length", [CONTEXT - TEMPLATE, CONTEXT, 5 * CONTEXT])
@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES, MESSAGES])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_its_api(
    path: str, length: int, setting: Setting
) -> None:
    content = "b" * (length + TEMPLATE if path == TEXT else length)
    answer = answer_to(path, body(path, content, 5), setting)
    error = answer.json["error"]
    assert answer.status == 400
    if path == MESSAGES:
        assert error["message"].startswith("prompt is too long: ")
        assert error["message"].endswith(f" tokens > {CONTEXT} maximum")
        assert error["type"] == "invalid_request_error"
    else:
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
