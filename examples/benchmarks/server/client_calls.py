"""Other projects' Python clients against the built-in model; prints a row of the table of clients.

    PYTHON examples/benchmarks/server/client_calls.py CLIENT URL

PYTHON is that of an environment with the client; nothing of Podway is imported. Each operation is
tried once, without retries, and has passed if the client returned what it should have.
"""

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

LONG = 100_000  # tokens, more than the context has
HELLO, WEATHER = "Hello!", "What is the weather in Paris?"
JSON = "Answer in JSON: the name is Ann, the age is 3."
EDITS = {"edits": [{"type": "clear_tool_uses_20250919"}]}
Operations = Iterator[tuple[str, Callable[[], Any]]]
load: Callable[[str], Any] = importlib.import_module
BASE: Any = {"model": "builtin", "api_key": "any", "max_retries": 0}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def langchain(url: str) -> Operations:
    openai = partial(load("langchain_openai").ChatOpenAI, base_url=f"{url}/v1", **BASE)
    claude = partial(load("langchain_anthropic").ChatAnthropic, base_url=url, **BASE)
    responses = partial(openai, use_responses_api=True)
    for name, make in (("chat", openai), ("responses", responses), ("messages", claude)):
        bound = make(max_tokens=500).bind_tools([get_weather], tool_choice="any")
        parsed = make().with_structured_output(Person, method="json_schema")
        yield f"{name}: long max_tokens", partial(make(max_tokens=LONG).invoke, HELLO)
        yield f"{name}: stream", lambda: list(make().stream(HELLO))[2:]  # noqa: B023
        yield f"{name}: tool", lambda: bound.invoke(WEATHER).tool_calls  # noqa: B023
        yield f"{name}: JSON schema", partial(parsed.invoke, JSON)
    yield "chat: verbosity", partial(openai(verbosity="low").invoke, HELLO)
    edited = claude(betas=["context-management-2025-06-27"], context_management=EDITS)
    yield "messages: clear_tool_uses", partial(edited.invoke, HELLO)


def openai_agents(url: str) -> Operations:
    agents, openai = load("agents"), load("openai")
    agents.set_tracing_disabled(True)
    client = partial(openai.AsyncOpenAI, base_url=f"{url}/v1", api_key="any", max_retries=0)
    more = {"tools": [agents.function_tool(get_weather)]}

    async def run(kind: Any, ask: str, fields: Any, **settings: Any) -> Any:
        model = kind(model="builtin", openai_client=client())
        given = agents.ModelSettings(**settings)
        agent = agents.Agent(name="a", model=model, model_settings=given, **fields)
        return (await agents.Runner.run(agent, ask)).final_output

    for name, kind in (
        ("chat", agents.OpenAIChatCompletionsModel),
        ("responses", agents.OpenAIResponsesModel),
        ("WebSocket", agents.OpenAIResponsesWSModel),
    ):
        yield f"{name}: long max_tokens", partial(run, kind, HELLO, {}, max_tokens=LONG)
        yield f"{name}: verbosity", partial(run, kind, HELLO, {}, verbosity="low")
        yield f"{name}: tool", partial(run, kind, WEATHER, more, tool_choice="required")
        yield f"{name}: JSON schema", partial(run, kind, JSON, {"output_type": Person})

    async def session() -> bool:
        kept = agents.OpenAIConversationsSession(openai_client=client())
        model = agents.OpenAIResponsesModel(model="builtin", openai_client=client())
        for ask in (HELLO, WEATHER):
            await agents.Runner.run(agents.Agent(name="a", model=model), ask, session=kept)
        roles = [item["role"] for item in await kept.get_items()]
        last = await kept.pop_item()
        await kept.clear_session()
        return roles == ["user", "assistant"] * 2 and last["role"] == "assistant"

    yield "conversations", session


def instructor(url: str) -> Operations:
    library = load("instructor")
    ask: Any = {"messages": [{"role": "user", "content": JSON}], "response_model": Person}
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
        raw = load("openai").OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        made = library.from_openai(raw, mode=library.Mode[mode], model="builtin")
        yield f"{mode}: create", partial(made.create, **ask, max_retries=0)
        yield f"{mode}: partial", lambda: list(made.create_partial(**ask))  # noqa: B023


def pydantic_ai(url: str) -> Operations:
    library, openai = load("pydantic_ai"), load("pydantic_ai.models.openai")
    provider = load("pydantic_ai.providers.openai").OpenAIProvider
    claude = load("pydantic_ai.providers.anthropic").AnthropicProvider

    async def run(make: Any, ask: str, fields: Any, max_tokens: int = 500) -> Any:
        base = claude(base_url=url, api_key="any") if "Anthropic" in make.__name__ else None
        model = make("builtin", provider=base or provider(base_url=f"{url}/v1", api_key="any"))
        agent = library.Agent(model, retries=0, **fields)
        return (await agent.run(ask, model_settings={"max_tokens": max_tokens})).output

    for name, make in (
        ("chat", openai.OpenAIChatModel),
        ("responses", openai.OpenAIResponsesModel),
        ("messages", load("pydantic_ai.models.anthropic").AnthropicModel),
    ):
        yield f"{name}: long max_tokens", partial(run, make, HELLO, {}, LONG)
        yield f"{name}: tool", partial(run, make, WEATHER, {"tools": [get_weather]})
        yield f"{name}: JSON by a tool", partial(run, make, JSON, {"output_type": Person})
        native = {"output_type": library.NativeOutput(Person)}
        yield f"{name}: JSON schema", partial(run, make, JSON, native)


CLIENTS: dict[str, Callable[[str], Operations]] = {
    "langchain": langchain,
    "openai-agents": openai_agents,
    "instructor": instructor,
    "pydantic-ai-slim": pydantic_ai,
}


def main() -> None:
    """Try all operations of a client; print the row as JSON."""
    name, url = sys.argv[1:]
    operations: list[dict[str, Any]] = []
    for operation, call in CLIENTS[name](url):
        try:
            found = call()
            found = asyncio.run(found) if inspect.iscoroutine(found) else found
            why = "" if found else "nothing came back"
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        operations.append({"name": operation, "passed": not why, "why": why})
    row = {"client": name, "version": version(name), "operations": operations}
    sys.stdout.write(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
