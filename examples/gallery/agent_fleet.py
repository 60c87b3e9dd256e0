"""One caller floods the server; another asks one question at a time. What does the second wait?

    podway serve builtin --max-batch-size 16 --admin-api-key admin \
        --api-key flood,person
    python examples/gallery/agent_fleet.py [URL]

Under `fcfs` a question is the next to start, but waits for a place among the flood's running
requests; under `fair` each key has its share of the tokens.
"""

import asyncio
import sys
import time
from statistics import median

from openai import AsyncOpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
STREAMS, QUESTIONS = 48, 3


async def ask(client: AsyncOpenAI, model: str, prompt: str, tokens: int) -> float:
    """Seconds to the first token of an answer, which is read to its end."""
    began, first = time.monotonic(), 0.0
    chunks = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in chunks:
        first = first or time.monotonic() - began
    return first


async def flood(client: AsyncOpenAI, model: str, number: int) -> None:
    """An agent that sends its next prompt as soon as it has an answer."""
    turn = 0
    while True:
        turn += 1
        await ask(client, model, f"Agent {number}, turn {turn}: " + "a long story " * 20, 100)


async def main() -> None:
    person = AsyncOpenAI(base_url=f"{URL}/v1", api_key="person")
    fleet = AsyncOpenAI(base_url=f"{URL}/v1", api_key="flood")
    admin = AsyncOpenAI(base_url=f"{URL}/v1", api_key="admin")
    model = (await person.models.list()).data[0].id
    for policy in ("fcfs", "fair"):
        await admin.post(f"{URL}/admin/policy", body={"policy": policy}, cast_to=object)
        agents = [asyncio.create_task(flood(fleet, model, number)) for number in range(STREAMS)]
        await asyncio.sleep(1)
        waits = [await ask(person, model, f"Question {at}?", 20) for at in range(QUESTIONS)]
        for agent in agents:
            if not agent.cancel():
                agent.result()  # raises what ended it
        print(f"{policy}: first token after {median(waits):.2f} s, at most {max(waits):.2f} s")


if __name__ == "__main__":
    asyncio.run(main())
