"""Anthropic's own client against a real port."""

import json
from collections.abc import Iterator

import anthropic
import pytest

from adapters.dialects.choosing import choose_dialect
from tests.gateway.rig import MODEL, Setting
from tests.gateway.serve.live import Live, listening

TEXT = "Grüße aus dem Süden 🙂 "
CALL = '<think>Hm.</think>Well.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STEP = 0.001
HI: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
TOOLS: list[anthropic.types.ToolParam] = [{"name": "add", "input_schema": {"type": "object"}}]


def client_of(live: Live, key: str = "any") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url.removesuffix("/v1"), api_key=key, max_retries=0)


@pytest.fixture
def client() -> Iterator[anthropic.Anthropic]:
    with listening(Setting(texts=(TEXT,), step=STEP)) as live, client_of(live) as client:
        yield client


def test_the_client_gets_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=99, messages=HI, system="Be kind.")
    (block,) = message.content
    assert block.type == "text"
    assert block.text == TEXT
    assert message._request_id
    counted = client.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
    assert counted.input_tokens == message.usage.input_tokens


def test_the_client_streams(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=99, messages=HI) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().stop_reason == "end_turn"


def test_the_client_collects_reasoning_and_calls_and_sends_results() -> None:
    hermes = choose_dialect("", "hermes", "think")
    setting = Setting(texts=(CALL, "Two."), step=STEP, dialect=hermes)
    with listening(setting) as live, client_of(live) as client:
        with client.messages.stream(
            model=MODEL,
            max_tokens=99,
            messages=HI,
            tools=TOOLS,
            thinking={"type": "adaptive"},
        ) as stream:
            message = stream.get_final_message()
        thought, text, call = message.content
        assert thought.type == "thinking"
        assert thought.thinking == "Hm."
        assert text.type == "text"
        assert call.type == "tool_use"
        assert json.loads(json.dumps(call.input)) == {"a": 1}
        assert message.stop_reason == "tool_use"
        reply = client.messages.create(
            model=MODEL,
            max_tokens=20,
            tools=TOOLS,
            messages=[
                *HI,
                {"role": "assistant", "content": message.content},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "2"}],
                },
            ],
        )
    (block,) = reply.content
    assert block.type == "text"
    assert block.text == "Two."


def test_the_client_raises_its_own_errors() -> None:
    with listening(Setting(keys=("right",))) as live:
        with client_of(live, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(model=MODEL, max_tokens=1, messages=HI)
        with client_of(live, "right") as client:
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(model="claude", max_tokens=1, messages=HI)
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                client.messages.create(
                    model=MODEL, max_tokens=1, messages=HI, extra_body={"temperature": 2}
                )
