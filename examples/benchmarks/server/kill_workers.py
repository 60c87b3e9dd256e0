"""Kill a random worker every few seconds under full load, and compare every text.

    python -m examples.benchmarks.server.kill_workers
        [--seconds 120] [--every 5] [--streams 16] [--out DIR] [-- FLAGS OF podway serve]
    python -m examples.benchmarks.server.kill_workers
        --kills N    # N kills, each as soon as tokens arrive again

Half of the streams are greedy, half are seeded. Each sends one request after another while workers
are killed; before that, every request runs once undisturbed. A request that gets a 503 is sent
again after `retry-after`, as official clients do. Any other difference from the undisturbed text
is a failure, and the program then exits with 1. If there is no worker when a kill is due, because
one is just being started, the kill waits for it. The longest pause within a stream before the first
kill is measured as well, and so is the load of the machine.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from examples.benchmarks.server.served import serving

WORKER_NAME = "podway-worker"
POLL_SECONDS = 0.02
QUESTIONS = (
    "Tell me a story about a fox.",
    "What is Podway? Explain it in a few words, and then explain what an iteration is.",
    "What is 12 + 30?",
    "Write a poem about rain.",
)


@dataclass
class Counts:
    """What happened while workers were killed."""

    kills: int = 0  # of workers that ran
    early_kills: int = 0  # before a token had arrived since the previous kill
    late_kills: int = 0  # that waited because there was no worker when they were due
    answers: int = 0
    tokens: int = 0
    unavailable: int = 0
    failures: list[str] = field(default_factory=list)
    longest_pause: float = 0.0  # seconds between two chunks of a stream
    pauses: list[float] = field(default_factory=list)  # the longest one around each kill
    undisturbed_pause: float = 0.0  # the longest one before the first kill
    load: float = 0.0  # processes per core that want to run, over the last minute of the run
    killed_at: float = 0.0  # the last kill

    def note_pause(self, start: float, end: float) -> None:
        """No chunk of a stream arrived meanwhile."""
        self.longest_pause = max(self.longest_pause, end - start)
        if self.pauses and start <= self.killed_at <= end:
            self.pauses[-1] = max(self.pauses[-1], end - start)

    # A token has arrived since the last kill
    flows: asyncio.Event = field(default_factory=asyncio.Event)


class ServiceUnavailable(Exception):
    """A 503 instead of a stream; `seconds` until the next attempt."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"retry after {seconds} s")
        self.seconds = seconds


def body_of(index: int) -> dict[str, Any]:
    """Request number `index`; even ones are greedy, odd ones are seeded."""
    return {
        "model": "builtin",
        "prompt": QUESTIONS[index % len(QUESTIONS)] * (1 + index % 5),
        "max_tokens": 200 + 37 * index % 500,
        "temperature": float(index % 2),
        "seed": index,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def chunks(session: aiohttp.ClientSession, url: str, index: int) -> AsyncIterator[Any]:
    """The events of one stream. Raises `ServiceUnavailable`, or `RuntimeError` on an error."""
    async with session.post(f"{url}/v1/completions", json=body_of(index)) as response:
        if response.status == 503:
            raise ServiceUnavailable(float(response.headers.get("retry-after-ms", "1000")) / 1000)
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"]))
                yield chunk


async def answer(
    session: aiohttp.ClientSession, url: str, index: int, counts: Counts
) -> tuple[str, int]:
    """The whole text, and its number of tokens from `usage`."""
    pieces: list[str] = []
    num_tokens = 0
    last: float | None = None
    async for chunk in chunks(session, url, index):
        now = time.perf_counter()
        if last is not None:
            counts.note_pause(last, now)
        last = now
        counts.flows.set()
        pieces += [choice["text"] for choice in chunk["choices"]]
        num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    return "".join(pieces), num_tokens


async def one_stream(
    session: aiohttp.ClientSession, url: str, number: int, over: asyncio.Event, counts: Counts,
    undisturbed: list[tuple[str, int]],
) -> None:  # fmt: skip
    """Send requests until `over`; compare every text with the undisturbed one."""
    index = number
    while not over.is_set():
        try:
            text = await answer(session, url, index % len(undisturbed), counts)
        except ServiceUnavailable as error:
            counts.unavailable += 1
            await asyncio.sleep(error.seconds)
            continue
        except (RuntimeError, aiohttp.ClientError) as error:
            counts.failures.append(f"stream {number}: {type(error).__name__}: {error}")
        else:
            counts.answers += 1
            counts.tokens += text[1]
            if text != undisturbed[index % len(undisturbed)]:
                counts.failures.append(f"stream {number}: not the undisturbed text")
        index += 1 if number % 2 else 3


async def kill_workers(
    server: psutil.Process, arguments: argparse.Namespace, counts: Counts
) -> None:
    """Send SIGKILL to random workers of the server until the time or the number is reached."""
    source = random.Random(arguments.seed)
    until = time.perf_counter() + arguments.seconds
    due = time.perf_counter()
    while counts.kills < (arguments.kills or sys.maxsize):
        if arguments.kills:
            await counts.flows.wait()
        due = max(due + arguments.every, time.perf_counter())
        if not arguments.kills:
            if due > until:
                break
            await asyncio.sleep(due - time.perf_counter())
        worker, waited = await living_worker(server, source)
        counts.late_kills += waited
        counts.early_kills += not counts.flows.is_set()
        worker.kill()
        counts.kills += 1
        counts.killed_at = time.perf_counter()
        counts.pauses.append(0.0)
        counts.flows.clear()


async def living_worker(
    server: psutil.Process, source: random.Random
) -> tuple[psutil.Process, bool]:
    """A random worker of the server, and whether it had to be waited for."""
    waited = False
    while True:
        workers = []
        for process in server.children():
            with suppress(psutil.NoSuchProcess):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if process.name() == WORKER_NAME and is_alive:
                    workers.append(process)
        if workers:
            return source.choice(workers), waited
        waited = True
        await asyncio.sleep(POLL_SECONDS)


async def measure(server: psutil.Process, url: str, arguments: argparse.Namespace) -> Counts:
    """Undisturbed texts, then the same requests while workers are killed."""
    counts, over = Counts(), asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        calm = Counts()
        undisturbed = await asyncio.gather(
            *(answer(session, url, index, calm) for index in range(arguments.bodies))
        )
        counts.undisturbed_pause = calm.longest_pause
        async with asyncio.TaskGroup() as group:
            for number in range(arguments.streams):
                group.create_task(one_stream(session, url, number, over, counts, undisturbed))
            await kill_workers(server, arguments, counts)
            over.set()
            counts.load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return counts


def report(arguments: argparse.Namespace, counts: Counts) -> str:
    """The Markdown table."""
    rows = {
        "kill -9 of a random worker": "when tokens arrive"
        if arguments.kills
        else f"every {arguments.every:g} s for {arguments.seconds:g} s",
        "streams": f"{arguments.streams}, half greedy, half seeded",
        "flags of the server": f"`{' '.join(arguments.flags)}`" if arguments.flags else "none",
        "workers killed": f"{counts.kills}, of them {counts.early_kills} before a token",
        "kills that waited for a worker to be started": f"{counts.late_kills}",
        "answers, each compared with its undisturbed text": f"{counts.answers}",
        "tokens": f"{counts.tokens}",
        "failed or different": f"{len(counts.failures)}",
        "new requests that got a 503": f"{counts.unavailable}",
        "longest pause around a kill, seconds: median of the kills": f"{median(counts.pauses):.1f}",
        "longest pause within a stream, seconds": f"{counts.longest_pause:.1f}",
        "the same before the first kill": f"{counts.undisturbed_pause:.2f}",
        "load per core": f"{counts.load:.1f}",
    }
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {cell} |" for name, cell in rows.items())]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill workers under load.")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--kills", type=int, help="number of kills, each when tokens arrive again")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--bodies", type=int, default=24, help="different requests")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of workers")
    parser.add_argument("--out", type=Path, help="write NAME.json here")
    parser.add_argument("--name", default="survival")
    parser.add_argument("flags", nargs="*", help="after --: flags of podway serve")
    arguments = parser.parse_args()
    with serving(arguments.flags) as (server, url):
        counts = asyncio.run(measure(server, url, arguments))
    print(report(arguments, counts))
    for failure in counts.failures[:20]:
        print(failure, file=sys.stderr)
    if arguments.out is not None:
        hidden = {"flows", "killed_at"}
        counted = {name: value for name, value in vars(counts).items() if name not in hidden}
        result = counted | {"flags": arguments.flags, "seconds": arguments.seconds}
        (arguments.out / f"{arguments.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(counts.failures))


if __name__ == "__main__":
    main()
