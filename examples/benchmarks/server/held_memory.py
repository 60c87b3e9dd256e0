"""The memory of conversations that clients hold open over WebSockets.

    python -m examples.benchmarks.server.held_memory [--connections 1000] [--out DIR]

The built-in model is served. Each connection sends a message of 40 words with `store: false`, gets
8 tokens, and stays open, so that the server keeps its conversation: token ids, items and text. The
table has the private memory of the server's own process as they are added. It is measured again
after all have left, with as many others, and after these have left.
"""

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from examples.benchmarks.server.agent_turns import FLAGS, MARK, OUT, OUTPUT_TOKENS, WORDS
from examples.benchmarks.server.served import serving

NUM_WORDS = 40
STEPS = 10
AT_ONCE = 4


def private_mib(process: psutil.Process) -> float:
    """Memory of this process alone."""
    return round(process.memory_full_info().uss / (1 << 20), 1)


async def hold(ws: aiohttp.ClientWebSocketResponse, number: int) -> int:
    """One turn; the tokens of its prompt."""
    text = " ".join(random.Random(number).choices(WORDS, k=NUM_WORDS))
    body = {
        "type": "response.create", "model": "builtin", "input": text, "store": False,
        "max_output_tokens": OUTPUT_TOKENS, "min_tokens": OUTPUT_TOKENS,
    }  # fmt: skip
    await ws.send_str(json.dumps(body))
    async for message in ws:
        event = json.loads(message.data)
        assert event["type"] not in ("error", "response.failed"), event
        if event["type"] in ("response.completed", "response.incomplete"):
            return int(event["response"]["usage"]["input_tokens"])
    raise AssertionError("the connection was closed")


async def measure(num_connections: int) -> dict[str, Any]:
    """Private MiB by the number of conversations, and after all have left."""
    flags = (*FLAGS, "--max-address-connections", str(num_connections + 10))
    with serving(flags) as (process, url):
        seats = asyncio.Semaphore(AT_ONCE)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(number: int) -> tuple[aiohttp.ClientWebSocketResponse, int]:
                async with seats:
                    ws = await session.ws_connect(f"{url}/v1/responses")
                    return ws, await hold(ws, number)

            async def leave() -> float:
                await asyncio.gather(*(ws.close() for ws, _ in connections))
                connections.clear()
                await asyncio.sleep(2.0)
                return private_mib(process)

            connections = [await one(0)]  # what the first one loads counts for none
            sizes = {0: private_mib(process)}
            share = num_connections // STEPS
            for step in range(STEPS):
                numbers = range(1 + step * share, 1 + (step + 1) * share)
                connections += await asyncio.gather(*map(one, numbers))
                sizes[len(connections) - 1] = private_mib(process)
            found = {
                "tokens": sum(tokens for _, tokens in connections) // len(connections),
                "mib": sizes,
                "mib_after": await leave(),
            }
            others = range(num_connections + 1, 2 * num_connections + 1)
            connections += await asyncio.gather(*map(one, others))
            return found | {"mib_again": private_mib(process), "mib_after_again": await leave()}


def section(found: dict[str, Any]) -> str:
    """The part of the page."""
    sizes = {int(number): mib for number, mib in found["mib"].items()}
    most = max(sizes)
    each = 1024 * (sizes[most] - sizes[0]) / most
    rows = "".join(f"| {number:,} | {mib} |\n" for number, mib in sizes.items())
    return (
        f"{MARK}\n"
        "`python -m examples.benchmarks.server.held_memory`: private memory of the server's "
        "process while connections\nstay open, each with a conversation of "
        f"{found['tokens']:,} tokens that is not stored\n([JSON](held_memory.json)): "
        f"{each:.0f} KiB for each. After all have left it has {found['mib_after']} MiB, with "
        f"{most:,} others\n{found['mib_again']}, and after these have left "
        f"{found['mib_after_again']}: memory is used again. What stays are the timelines of "
        "the\nlast 1,000 requests and the index of the KV cache's blocks, both bounded, and pages "
        "of Python's allocator\nthat are partly used. The KV of the conversations is the worker's, "
        "and bounded.\n\n"
        f"| held conversations | MiB |\n|---|---|\n{rows}"
    )


def main() -> None:
    """Measure, and write the JSON file and the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    found = asyncio.run(measure(given.connections))
    (given.out / "held_memory.json").write_text(json.dumps(found, indent=1) + "\n")
    page = given.out / "README.md"
    page.write_text(page.read_text().partition(MARK)[0].rstrip("\n") + "\n" + section(found))


if __name__ == "__main__":
    main()
