from collections.abc import Iterator

import anthropic
import pytest
from anthropic.types import Message, MessageParam, ToolParam

HELLO: list[MessageParam] = [{"role": "user", "content": "Hello!"}]
WEATHER: list[MessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"temperature": 0}
TOOL: ToolParam = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server_url, api_key="any", max_retries=0) as client:
        yield client


def test_a_stream_adds_up_to_the_whole_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(
        model="builtin", max_tokens=50, messages=HELLO, extra_body=GREEDY
    )
    with client.messages.stream(
        model="builtin", max_tokens=50, messages=HELLO, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.type for block in whole.content] == ["text"]
    assert text
    assert [getattr(block, "text", None) for block in (*whole.content, *final.content)] == [
        text
    ] * 2
    assert final.stop_reason == whole.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens > 0


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_tool_is_called_and_its_result_answered(
    client: anthropic.Anthropic, is_stream: bool
) -> None:
    called: Message
    with client.messages.stream(
        model="builtin", max_tokens=99, messages=WEATHER, tools=[TOOL], extra_body=GREEDY
    ) as stream:
        called = stream.get_final_message()
    if not is_stream:
        called = client.messages.create(
            model="builtin", max_tokens=99, messages=WEATHER, tools=[TOOL], extra_body=GREEDY
        )
    assert called.stop_reason == "tool_use"
    call = next(block for block in called.content if block.type == "tool_use")
    assert call.name == "get_weather"
    assert list(call.input) == ["city"]
    answer = client.messages.create(
        model="builtin",
        max_tokens=50,
        messages=[
            *WEATHER,
            {"role": "assistant", "content": called.content},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}],
            },
        ],
        tools=[TOOL],
    )
    assert answer.content


def test_tokens_are_counted_and_errors_are_its_own(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="builtin", messages=HELLO)
    assert counted.input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="unknown", max_tokens=5, messages=HELLO)
