import pytest
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr


@pytest.fixture
def chat(server_url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="builtin",
        base_url=f"{server_url}/v1",
        api_key=SecretStr("any"),
        temperature=0,
        max_retries=0,
    )


def test_a_message_is_answered(chat: ChatOpenAI) -> None:
    message = chat.invoke("Hello!")
    assert message.content
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] > 0


def test_a_stream_adds_up_to_the_whole_message(chat: ChatOpenAI) -> None:
    parts = [str(part.content) for part in chat.stream("Hello!")]
    assert len(parts) > 2
    assert "".join(parts) == chat.invoke("Hello!").content


async def test_many_are_answered_at_once(chat: ChatOpenAI) -> None:
    first, *others = await chat.abatch(["Hello!"] * 3)
    assert [other.content for other in others] == [first.content] * 2


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def test_structured_output_is_an_object(chat: ChatOpenAI) -> None:
    structured = chat.with_structured_output(Person, method="json_schema")
    assert isinstance(structured.invoke("Answer in JSON: the name is Ann, the age is 3."), Person)


def test_a_bound_tool_is_called_whole_and_streamed(chat: ChatOpenAI) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    bound = chat.bind_tools([get_weather])
    question = "What is the weather in Paris?"
    message = bound.invoke(question)
    gathered = sum(bound.stream(question), start=AIMessageChunk(content=""))
    for calls in (message.tool_calls, gathered.tool_calls):
        assert [(call["name"], list(call["args"])) for call in calls] == [("get_weather", ["city"])]
