"""What a late turn of a long conversation costs, over HTTP and over a WebSocket.

    python -m examples.benchmarks.server.agent_turns
        [--turns 30] [--words 240] [--rounds 3] [--out DIR]

The built-in model is served. Each turn adds a message of WORDS words and gets 8 tokens. Over HTTP
the input is either the whole conversation or continues the last, stored response; over a WebSocket
it continues the last response, which is not stored. The table has the medians of the last five
turns: bytes sent, milliseconds until the first text, and CPU milliseconds of the event loop's
thread, of the server's other threads, and of the worker.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from examples.benchmarks.server.served import serving
from examples.benchmarks.server.start_time import cpu_name

FLAGS = ("builtin", "--max-model-len", "32768", "--kv-memory", "512MiB")
OUT = Path(__file__).parents[1] / "results" / "agent_turns"
MARK = "\n## Conversations that are held\n"  # the page's other part, of held_memory.py
LAST_TURNS = 5
OUTPUT_TOKENS = 8
Send = Callable[[dict[str, Any]], AsyncIterator[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """Costs of one turn; times in milliseconds."""

    input_tokens: int
    bytes_sent: int
    first_text: float
    loop_cpu: float
    threads_cpu: float
    worker_cpu: float


@dataclass(slots=True)
class Session:
    """A conversation over one transport; `send` yields the events of a response."""

    process: psutil.Process
    send: Send
    is_whole: bool  # each input has all messages
    is_stored: bool
    chance: random.Random

    async def run(self, num_turns: int, num_words: int) -> list[Turn]:
        """The costs of each turn."""
        turns, items, previous = [], [], None
        for _ in range(num_turns):
            text = " ".join(self.chance.choice(WORDS) for _ in range(num_words))
            items.append({"role": "user", "content": text})
            body = {
                "model": "builtin", "input": items if self.is_whole else items[-1:],
                "store": self.is_stored, "max_output_tokens": OUTPUT_TOKENS,
                "min_tokens": OUTPUT_TOKENS, "temperature": 0,
            }  # fmt: skip
            if not self.is_whole and previous is not None:
                body["previous_response_id"] = previous
            turn, response = await self._turn(body)
            turns.append(turn)
            previous = response["id"]
            items += response["output"]
        return turns

    async def _turn(self, body: dict[str, Any]) -> tuple[Turn, Any]:
        before, began, first_text = self._cpu(), time.perf_counter(), 0.0
        response: Any = None
        async for event in self.send(body):
            if event["type"] == "response.output_text.delta" and not first_text:
                first_text = time.perf_counter() - began
            assert event["type"] not in ("error", "response.failed"), event
            response = event.get("response", response)
        used = [1e3 * (after - start) for start, after in zip(before, self._cpu(), strict=True)]
        num_bytes = len(json.dumps(body))
        tokens = response["usage"]["input_tokens"]
        return Turn(tokens, num_bytes, 1e3 * first_text, *used), response

    def _cpu(self) -> tuple[float, float, float]:
        """CPU seconds of the loop's thread, of the other threads, and of the worker."""
        pid = self.process.pid
        threads = {tid: _thread_seconds(pid, tid) for tid in os.listdir(f"/proc/{pid}/task")}
        loop = threads.pop(str(pid))
        children = self.process.children(recursive=True)
        workers = sum(
            _thread_seconds(child.pid, tid)
            for child in children
            for tid in os.listdir(f"/proc/{child.pid}/task")
        )
        return loop, sum(threads.values()), workers


NOTES = """\
- The other threads decode, render and tokenize. Over the WebSocket they render the last items
  twice, with and without what is new, which shows whether the template appends; only new text is
  tokenized. What is left copies the ids and the text of the prompt.
- The loop hashes the new blocks only; before, it hashed all 1,850, which took it 3 ms. The rest of
  its time is mostly the engine's: it looks the blocks up, shares and gives back their pages, and
  runs eight iterations. HTTP with `previous_response_id` also writes the whole conversation to the
  store.
- The worker computes the new tokens only, over all three.
- Where all was rendered and hashed, on the commit before and right behind a run at a load of 18, a
  turn over the WebSocket took the loop 25.7 ms and the other threads 4.9, against 22.8 and 2.3.
"""
WORDS = Path(__file__).read_text(encoding="utf-8").split()


def _thread_seconds(pid: int, tid: str) -> float:
    try:
        return int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:  # the thread has ended
        return 0.0


@asynccontextmanager
async def over_http(url: str) -> AsyncIterator[Send]:
    """Requests with `stream: true`."""
    async with aiohttp.ClientSession() as session:

        async def send(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            data = json.dumps(body | {"stream": True}).encode()
            headers = {"content-type": "application/json"}
            async with session.post(f"{url}/v1/responses", data=data, headers=headers) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: "):
                        yield json.loads(line[6:])

        yield send


@asynccontextmanager
async def over_websocket(url: str) -> AsyncIterator[Send]:
    """Messages of one connection."""
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/responses") as ws:

        async def send(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            await ws.send_str(json.dumps({"type": "response.create", **body}))
            async for message in ws:
                event = json.loads(message.data)
                yield event
                if event["type"] in ("response.completed", "response.incomplete"):
                    return

        yield send


async def main(flags: argparse.Namespace) -> dict[str, Any]:
    """The medians of the last turns by transport."""
    ways = {
        "HTTP, whole input": (over_http, True, False),
        "HTTP, previous_response_id": (over_http, False, True),
        "WebSocket": (over_websocket, False, False),
    }
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    with serving(FLAGS) as (process, url):
        for number in range(flags.rounds):
            for name, (connect, is_whole, is_stored) in ways.items():
                async with connect(url) as send:
                    chance = random.Random(f"{name}{number}")
                    session = Session(process, send, is_whole, is_stored, chance)
                    turns[name] += (await session.run(flags.turns, flags.words))[-LAST_TURNS:]
    return {
        name: {
            field.name: round(median(getattr(turn, field.name) for turn in each), 2)
            for field in fields(Turn)
        }
        for name, each in turns.items()
    } | {
        "rounds": flags.rounds,
        "turns": flags.turns,
        "machine": f"{os.cpu_count()} cores of {cpu_name()}",
        "load": round(os.getloadavg()[0], 1),
    }


def head(found: dict[str, Any]) -> str:
    """The first part of the page."""
    rows = "".join(
        f"| {name} | {row['input_tokens']:,} | {row['bytes_sent']:,} | "
        f"{row['first_text'] / 1e3:.2f} | {row['loop_cpu']:.1f} | {row['threads_cpu']:.1f} | "
        f"{row['worker_cpu']:,.0f} |\n"
        for name, row in found.items()
        if isinstance(row, dict)
    )
    return f"""# A late turn of an agent's conversation

`python -m examples.benchmarks.server.agent_turns --rounds {found["rounds"]}`: the built-in model;
{found["turns"]} turns of about 1,000 tokens, each answered with 8. Medians of the last five turns
of each round ([JSON](agent_turns.json)): seconds until the first text, and CPU milliseconds.
{found["machine"]}, at a load of {found["load"]:.1f}: above 2 the seconds say more of that load than
of the transport.

| transport | prompt tokens | bytes sent | first text, s | event loop | other threads | worker |
|---|---|---|---|---|---|---|
{rows}
{NOTES}"""


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    columns = [field.name for field in fields(Turn)]
    print(f"{'':28}" + "".join(f"{name:>14}" for name in columns))
    for name, row in results.items():
        if isinstance(row, dict):
            print(f"{name:28}" + "".join(f"{row[column]:14}" for column in columns))
    print(f"load average {' '.join(f'{part:.1f}' for part in os.getloadavg())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--words", type=int, default=240, help="of each message")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT, help="of the JSON file and the page")
    given = parser.parse_args()
    measured = asyncio.run(main(given))
    show(measured)
    text = json.dumps(measured, indent=1) + "\n"
    (given.out / "agent_turns.json").write_text(text, encoding="utf-8")
    page = given.out / "README.md"
    rest = page.read_text(encoding="utf-8").partition(MARK)[1:] if page.exists() else ()
    page.write_text(head(measured) + "".join(rest), encoding="utf-8")
