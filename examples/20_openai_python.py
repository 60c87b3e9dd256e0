"""The official Python client: plain, streaming, the streaming helper, and asyncio.

python examples/20_openai_python.py [URL]
"""

import asyncio
import sys

from openai import AsyncOpenAI, OpenAI

URL = (sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000") + "/v1"
KEY = "any"  # checked only by a server that was started with --api-key


def whole_answer(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello!"}], temperature=0
    )
    print("whole: ", answer.choices[0].message.content)


def stream(client: OpenAI, model: str) -> None:
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 2 + 3?"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    print("stream: ", end="")
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"  ({chunk.usage.completion_tokens} tokens)")


def stream_with_helper(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=[{"role": "user", "content": "What is Podway?"}]
    ) as events:
        print("helper: ", end="")
        for event in events:
            if event.type == "content.delta":
                print(event.delta, end="", flush=True)
        final = events.get_final_completion()
        print(f"  ({final.choices[0].finish_reason})")


async def many_at_once(client: AsyncOpenAI, model: str) -> None:
    async def sum_of(a: int, b: int) -> str:
        question = f"What is {a} + {b}?"
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0
        )
        return f"async:  {question} {answer.choices[0].message.content}"

    for line in await asyncio.gather(*(sum_of(a, a + 1) for a in range(1, 5))):
        print(line)


def main() -> None:
    with OpenAI(base_url=URL, api_key=KEY) as client:
        model = client.models.list().data[0].id
        whole_answer(client, model)
        stream(client, model)
        stream_with_helper(client, model)

    async def at_once() -> None:
        async with AsyncOpenAI(base_url=URL, api_key=KEY) as client:
            await many_at_once(client, model)

    asyncio.run(at_once())


if __name__ == "__main__":
    main()
