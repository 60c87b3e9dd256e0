"""Kill the server again and again under held streams, and compare every event.

    python -m examples.benchmarks.server.kill_server
        [--kills 24] [--streams 6] [--port 8210] [--out DIR] [-- FLAGS OF podway serve]

The server has a store. Each stream is held: a chat with a name, or a response in the background.
After each `kill -9` of the server and its worker it is started again with the same store, and the
readers go on after the last event that they have. Each stream that has ended is read once more from
its beginning: these bytes must be those that its reader has put together, and its text that of the
same request before the first kill. The program exits with 1 otherwise.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from examples.benchmarks.written import write_files

OUT = Path(__file__).parents[1] / "results" / "retries"
QUESTIONS = ("Tell me a story about a fox.", "What is an iteration?", "Write a poem about rain.")
RETRIES = "examples/benchmarks/results/retries/retries.json"
MAX_WAIT = 1.5  # seconds, from the first event after a start to the next kill
RETRY_SECONDS = 0.1
NAME = "x-conversation-id"
PAGE = """# Retries and resumption

## No retry livelock

`{command}`
plays random settings of the real engine in virtual time: full attention, windows and recurrent
layers. Clients give up while their prompt is computed, and send it again or a longer one, up to six
times; workers die in between. Memory is ample, so each retry must go on where the attempt before
stopped, and what it reads is checked slot by slot ([JSON](retries.json)):

{fuzz}"""
SECTION = """
## Held streams over killed servers

`python -m examples.benchmarks.server.kill_server`: the built-in model with `--store`, {num_streams}
held streams at once, half of them seeded chats with a name, half greedy background responses.
The server and its worker are killed (`kill -9`) at a random moment, and started again with the same
store. Readers go on after the last event that they have. Each stream that has ended is read once
more from its beginning ([JSON](server_kills.json)):

{kills}
A pause is the start of the server, and the recomputation of what was not stored.
"""


@dataclass(slots=True)
class Counts:
    """What happened. `resumed`: how often a reader went on after events that it had."""

    kills: int = 0
    streams: int = 0
    events: int = 0
    resumed: int = 0
    different: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)  # seconds from a kill to the next event


class ServerProcess:
    """`podway serve` on one port and store, started again after each kill."""

    def __init__(self, port: int, directory: str, flags: list[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        fixed = ["--port", str(port), "--store", f"{directory}/held.sqlite", "--log-level", "error"]
        self._command = [sys.executable, "-m", "gateway", "serve", *fixed, *flags]
        self._process: subprocess.Popen[str] | None = None
        self._killed_at: float | None = None
        self.flows = asyncio.Event()  # an event has arrived since the start

    def start(self) -> None:
        """Start it, and wait until it listens; blocks."""
        self.flows.clear()
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if " at http" not in self._process.stdout.readline():
            raise SystemExit("the server did not start")

    def kill(self) -> None:
        """SIGKILL; its worker ends with it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._killed_at = time.perf_counter()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def note_event(self, counts: Counts) -> None:
        """An event has arrived."""
        counts.events += 1
        if self._killed_at is not None:
            counts.pauses.append(time.perf_counter() - self._killed_at)
            self._killed_at = None
        self.flows.set()


@dataclass(slots=True)
class HeldStream:
    """A request whose events are read until they end. Even ones are chats, odd ones responses."""

    number: int
    seed: int  # requests with the same one have the same text
    blocks: list[bytes] = field(default_factory=list)
    response_id: str = ""

    @property
    def is_chat(self) -> bool:
        return self.seed % 2 == 0

    def request(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        """The path, the body and the headers of the POST."""
        question = QUESTIONS[self.seed % len(QUESTIONS)]
        body: dict[str, Any] = {"model": "builtin", "stream": True, "ignore_eos": True}
        length = 150 + 37 * self.seed % 200
        if self.is_chat:
            messages = [{"role": "user", "content": question}]
            body |= {"messages": messages, "max_tokens": length, "seed": self.seed}
            return "/v1/chat/completions", body, {NAME: f"talk-{self.number}"}
        body |= {"input": question, "max_output_tokens": length, "temperature": 0}
        return "/v1/responses", {**body, "background": True}, {}

    def place(self, after: int | None) -> tuple[str, dict[str, str]]:
        """Where its events can be read again: the path and the headers."""
        if self.is_chat:
            headers = {} if after is None else {"last-event-id": str(after)}
            return f"/v1/stream/talk-{self.number}", headers
        query = "" if after is None else f"&starting_after={after}"
        return f"/v1/responses/{self.response_id}?stream=true{query}", {}

    def add(self, block: bytes) -> None:
        self.blocks.append(block)
        if not self.is_chat and not self.response_id:
            found = re.search(rb'"id":"(resp_\w+)"', block)
            self.response_id = "" if found is None else found[1].decode()

    def text(self) -> str:
        pieces = []
        for block in self.blocks:
            data = block.split(b"data: ", 1)[1]
            if data.startswith(b"{"):
                event = json.loads(data)
                if self.is_chat:
                    pieces += [each["delta"].get("content") or "" for each in event["choices"]]
                elif event["type"] == "response.output_text.delta":
                    pieces.append(event["delta"])
        return "".join(pieces)


async def blocks_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The whole events of a stream, without pings."""
    lines: list[bytes] = []
    async for line in response.content:
        lines.append(line)
        if line == b"\n":
            block, lines = b"".join(lines), []
            if not block.startswith(b":"):
                yield block


async def read_on(
    session: aiohttp.ClientSession, server: ServerProcess, stream: HeldStream, counts: Counts
) -> None:
    """Begin the stream, or go on after its last event, until it ends or the server is gone."""
    if stream.blocks:
        path, headers = stream.place(len(stream.blocks) - 1)
        asking = session.get(server.url + path, headers=headers)
    else:
        path, body, headers = stream.request()
        asking = session.post(server.url + path, json=body, headers=headers)
    async with asking as response:
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {await response.text()}")
        counts.resumed += bool(stream.blocks)
        async for block in blocks_of(response):
            server.note_event(counts)
            stream.add(block)


async def read_whole(
    session: aiohttp.ClientSession, server: ServerProcess, stream: HeldStream, counts: Counts
) -> None:
    """Read the stream to its end, over as many servers as it takes."""
    while True:
        try:
            await read_on(session, server, stream, counts)
            return
        except aiohttp.ClientError:
            await asyncio.sleep(RETRY_SECONDS)


async def read_again(
    session: aiohttp.ClientSession, server: ServerProcess, stream: HeldStream
) -> list[bytes]:
    """All its events from the beginning, as they are kept for some minutes after its end."""
    path, headers = stream.place(None)
    while True:
        with suppress(aiohttp.ClientError):
            async with session.get(server.url + path, headers=headers) as response:
                return [block async for block in blocks_of(response)]
        await asyncio.sleep(RETRY_SECONDS)


async def measure(server: ServerProcess, num_kills: int, num_streams: int) -> Counts:
    """Each request undisturbed, then again and again until the last kill."""
    counts, numbers, ended = Counts(), iter(range(1 << 30)), asyncio.Event()
    streams: list[HeldStream] = []
    source = random.Random(1)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(seed: int) -> HeldStream:
            stream = HeldStream(next(numbers), seed)
            await read_whole(session, server, stream, counts)
            return stream

        async def again(seed: int) -> None:
            while not ended.is_set():
                stream = await one(seed)
                streams.append(stream)
                if await read_again(session, server, stream) != stream.blocks:
                    differs = f"stream {stream.number}: other events when read again"
                    counts.different.append(differs)

        await asyncio.to_thread(server.start)
        calm = await asyncio.gather(*map(one, range(num_streams)))
        counts = Counts()
        async with asyncio.TaskGroup() as group:
            for seed in range(num_streams):
                group.create_task(again(seed))
            for _ in range(num_kills):
                await server.flows.wait()
                await asyncio.sleep(source.uniform(0.0, MAX_WAIT))
                server.kill()
                counts.kills += 1
                await asyncio.to_thread(server.start)
            await server.flows.wait()
            ended.set()
        counts.streams = len(streams)
        for stream in streams:
            found, expected = stream.text(), calm[stream.seed].text()
            if found != expected:
                end = stream.blocks[-1][-200:].decode()
                counts.different.append(
                    f"stream {stream.number} of seed {stream.seed}: {len(found)} characters, not "
                    f"{len(expected)}; its end is {end}"
                )
    return counts


def page(runs: Mapping[str, Any]) -> str:
    """The page of `retries.json`, which the fuzzer writes, and of `server_kills.json` if given."""
    fuzz, kills = runs["retries"], runs.get("server_kills")
    counts = fuzz["counts"]
    first, last = fuzz["first"], fuzz["last"]
    played = {
        "cases": last - first,
        "failed": fuzz["failed"],
        "sessions": counts["sessions"],
        "attempts that were given up": counts["left"] + counts["left in flight"],
        "of them with an iteration in flight": counts["left in flight"],
        "workers killed": counts["kills"],
        "retries that found what was computed before": counts["retries that found something"],
        "KV slots read and compared": counts["slots read"],
        "states read and compared": counts["states read"],
    }
    command = f"python -m tests.fuzz.engine.retries {first} {last} --out {RETRIES}"
    head = PAGE.format(command=command, fuzz=_table(played))
    if kills is None:
        return head
    killed = {
        "servers killed": kills["kills"],
        "streams": kills["streams"],
        "events": kills["events"],
        "readers that went on after events that they had": kills["resumed"],
        "streams with other events or another text than undisturbed": len(kills["different"]),
        "from a kill to the next event, median": f"{median(kills['pauses']):.1f} s",
        "longest": f"{max(kills['pauses']):.1f} s",
        "load per core": f"{kills['load']:.1f}",
    }
    return head + SECTION.format(num_streams=kills["num_streams"], kills=_table(killed))


def _table(rows: Mapping[str, Any]) -> str:
    cells = {name: f"{cell:,}" if isinstance(cell, int) else cell for name, cell in rows.items()}
    return "".join(
        ["| | |\n|---|---|\n", *(f"| {name} | {cell} |\n" for name, cell in cells.items())]
    )


def main() -> None:
    """Measure, write `server_kills.json` and the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--port", type=int, default=8210)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("flags", nargs="*", help="after --: flags of podway serve")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(given.port, directory, given.flags)
        try:
            counts = asyncio.run(measure(server, given.kills, given.streams))
        finally:
            server.kill()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    found = asdict(counts) | {"num_streams": given.streams, "load": load}
    retries = json.loads((given.out / "retries.json").read_text())
    text = page({"retries": retries, "server_kills": found})
    write_files(given.out, {"server_kills.json": found, "README.md": text})
    sys.exit(bool(counts.different))


if __name__ == "__main__":
    main()
