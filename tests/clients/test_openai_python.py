"""The official Python client against a real server: parse, tools and responses.

Plain answers, streams and errors: `tests/gateway/serve/test_live.py` and
`examples/20_openai_python.py`; files and batches: `tests/gateway/serve/test_live_storage.py`.
"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

WEATHER: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the weather in Paris?"}
]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Person(BaseModel):
    """What an answer is parsed into."""

    name: str
    age: int


PERSON: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Answer in JSON: the name is Ann, the age is 3."}
]


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def at_once(server_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="any") as client:
        yield client


def test_parse_makes_an_object_of_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="builtin", messages=PERSON, response_format=Person, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_the_stream_helper_parses_as_well(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="builtin", messages=PERSON, response_format=Person, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI, choice: Any) -> None:
    called = client.chat.completions.create(
        model="builtin", messages=WEATHER, tools=[TOOL], tool_choice=choice, temperature=0
    ).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls is not None
    call = called.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    answer: Any = called.message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 degrees"}
    answer = client.chat.completions.create(
        model="builtin", messages=[*WEATHER, answer, result], tools=[TOOL], temperature=0
    ).choices[0]
    assert answer.message.content or answer.message.tool_calls


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="builtin", messages=WEATHER, tools=[TOOL], temperature=0
    )
    with client.chat.completions.stream(
        model="builtin", messages=WEATHER, tools=[TOOL], temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    for calls in (whole.choices[0].message.tool_calls, final.choices[0].message.tool_calls):
        assert calls is not None
        assert [call.type for call in calls] == ["function"]
    first, second = (
        each.choices[0].message.tool_calls[0].function  # type: ignore[index, union-attr] # as seen
        for each in (whole, final)
    )
    assert (first.name, first.arguments) == (second.name, second.arguments)


async def test_the_async_client_gets_logprobs(at_once: openai.AsyncOpenAI) -> None:
    answer = await at_once.chat.completions.create(
        model="builtin", messages=WEATHER, logprobs=True, top_logprobs=2, max_tokens=4
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [2] * 4


def test_responses_go_on_from_each_other_whole_and_streamed(client: openai.OpenAI) -> None:
    first = client.responses.create(model="builtin", input="Hello!", temperature=0)
    assert first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    with client.responses.stream(
        model="builtin", input="What is 2 + 3?", previous_response_id=first.id, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        second = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    assert second.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] != []
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_parse_and_call_tools(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="builtin",
        input="Answer in JSON: the name is Ann, the age is 3.",
        text_format=Person,
        temperature=0,
    )
    assert isinstance(parsed.output_parsed, Person)
    called = client.responses.create(
        model="builtin",
        input="What is the weather in Paris?",
        tools=[
            {
                "type": "function",
                "name": "get_weather",
                "parameters": TOOL["function"]["parameters"],
                "strict": True,
            }
        ],
        temperature=0,
    )
    calls = [item for item in called.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["get_weather"]


def test_decisions_have_an_answer_of_each_type(client: openai.OpenAI) -> None:
    part = {"type": "input_json", "data": {"order": 7}}
    given: Any = [{"role": "user", "content": [part]}]
    decision = client.decisions.create(
        model="builtin",
        input=given,
        questions=[
            {"type": "predicate", "instructions": "It is about an order.", "name": "order"},
            {
                "type": "choice",
                "instructions": "Who answers it?",
                "choices": [{"value": "sales"}, {"value": "support"}, {"value": False}],
            },
            {
                "type": "score",
                "instructions": "How urgent is it?",
                "levels": [{"label": "low"}, {"label": "high"}],
            },
        ],
    )
    predicate, choice, score = decision.answers
    assert predicate.type == "predicate"
    assert predicate.name == "order"
    assert 0 <= predicate.probability <= 1
    assert choice.type == "choice"
    assert sum(row.probability for row in choice.probabilities) == pytest.approx(1)
    assert choice.choice in ("sales", "support", False)
    assert score.type == "score"
    assert score.score == pytest.approx(score.probabilities[1].probability)
    assert decision.usage.output_tokens == 0
