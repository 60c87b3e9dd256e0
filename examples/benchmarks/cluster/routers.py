"""Two servers behind a router of another project: what works, what is cached, what a loss costs.

    python -m examples.benchmarks.cluster.routers [--out DIR] NAME=COMMAND ...

A command starts a router in the foreground; `{port}`, `{metrics_port}` and `{workers}` (two URLs)
in it are replaced. For instance, with `smg`, `sglang-router` and `vllm-router` from PyPI:

    'smg cache_aware=smg launch --host 127.0.0.1 --port {port} --prometheus-port {metrics_port}
     --policy cache_aware --worker-urls {workers}'

For each router, one after the other, with two fresh servers of the built-in model:

- chats: sessions of several messages each; the share of prompt tokens found cached
- cancel: seconds from the end of a client's connection until no server runs its request
- killed: `kill -9` of one server under load; requests that failed, and of those the ones sent
  more than `SETTLED_SECONDS` after the kill
- drained: SIGTERM of one server under load; requests that failed
"""

import argparse
import asyncio
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from examples.benchmarks.peers.servers import Server, Up, running, wait_for_a_token

SESSIONS, MESSAGES = 24, 4
SYSTEM_WORDS = 120  # of each session's own system prompt
LOAD_SECONDS = 12.0
SETTLED_SECONDS = 5.0
MODEL = "m"


@dataclass(frozen=True, slots=True)
class Result:
    """One router's row."""

    router: str
    answered: int  # of the chats' requests
    sent: int
    cached_share: float
    cancel_seconds: float
    killed: dict[str, int]
    drained: dict[str, int]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def replica(port: int) -> Server:
    """A server of the built-in model with one compute thread."""
    flags = f"--port {port} --served-model-name {MODEL} --threads 1 --store memory"
    command = (sys.executable, "-m", "gateway", "serve", *flags.split(), "--log-level", "error")
    return Server(f"replica {port}", "", command, port, MODEL, {})


@contextmanager
def routed(command: str, workers: list[str]) -> Iterator[str]:
    """A running router in front of these servers; its URL."""
    port, metrics_port = free_port(), free_port()
    words = command.format(port=port, metrics_port=metrics_port, workers=" ".join(workers))
    process = subprocess.Popen(
        shlex.split(words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def chat(
    session: aiohttp.ClientSession, messages: list[dict[str, str]], max_tokens: int
) -> dict[str, Any]:
    """One answer. Raises `aiohttp.ClientError` for anything but a 200."""
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens}
    async with session.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        found: dict[str, Any] = await response.json()
        return found


async def chats(session: aiohttp.ClientSession) -> tuple[int, float]:
    """All sessions at once: answers, and the share of prompt tokens that were cached."""
    answers = cached = prompt = 0

    async def one(number: int) -> None:
        nonlocal answers, cached, prompt
        words = " ".join(f"w{number}n{i}" for i in range(SYSTEM_WORDS))
        messages = [{"role": "system", "content": words}]
        for turn in range(MESSAGES):
            messages.append({"role": "user", "content": f"What is {number} + {turn}?"})
            with suppress(aiohttp.ClientError):
                reply = await chat(session, messages, 24)
                usage = reply["usage"]
                answers += 1
                prompt += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                messages.append(reply["choices"][0]["message"] | {"content": "A number."})

    await asyncio.gather(*map(one, range(SESSIONS)))
    return answers, cached / prompt if prompt else 0.0


async def num_running(workers: list[Up]) -> int:
    """Requests on all servers."""
    total = 0
    async with aiohttp.ClientSession() as session:
        for worker in workers:
            async with session.get(f"{worker.url}/v1/loads") as response:
                total += (await response.json())["aggregate"]["total_reqs"]
    return total


async def cancel(session: aiohttp.ClientSession, workers: list[Up]) -> float:
    """Seconds from hanging up on a long stream until no server runs a request."""
    content = "Tell me a story."
    body = {"model": MODEL, "prompt": content, "max_tokens": 4000, "stream": True}
    response = await session.post("/v1/completions", json=body | {"ignore_eos": True})
    await response.content.readline()
    assert await num_running(workers) == 1, "the stream runs"
    began = time.monotonic()
    response.close()
    while await num_running(workers):  # noqa: ASYNC110 - another process ends it
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def under_load(
    session: aiohttp.ClientSession, incident: Callable[[], object]
) -> dict[str, int]:
    """Requests sent all the time, with an incident after a quarter of it."""
    counts = {"requests": 0, "failed": 0, "failed_later": 0}
    began = time.monotonic()
    happened = began + LOAD_SECONDS / 4

    async def client(number: int) -> None:
        while (sent := time.monotonic()) < began + LOAD_SECONDS:
            counts["requests"] += 1
            messages = [{"role": "user", "content": f"What is {number} + {counts['requests']}?"}]
            try:
                await chat(session, messages, 16)
            except (aiohttp.ClientError, TimeoutError):
                counts["failed"] += 1
                counts["failed_later"] += sent > happened + SETTLED_SECONDS
                await asyncio.sleep(0.1)

    async def event() -> None:
        await asyncio.sleep(happened - time.monotonic())
        incident()

    await asyncio.gather(event(), *map(client, range(8)))
    return counts


async def measure(name: str, command: str) -> Result:
    """All of a router's figures; `killed` and `drained` with servers of their own."""
    answered, share, seconds = 0, 0.0, 0.0

    async def first(session: aiohttp.ClientSession, workers: list[Up]) -> None:
        nonlocal answered, share, seconds
        answered, share = await chats(session)
        seconds = await cancel(session, workers)

    await with_router(command, first)
    counts = []
    for number in (signal.SIGKILL, signal.SIGTERM):

        async def lose(
            session: aiohttp.ClientSession, workers: list[Up], number: int = number
        ) -> None:
            counts.append(await under_load(session, lambda: end(workers[0], number)))

        await with_router(command, lose)
    return Result(name, answered, SESSIONS * MESSAGES, share, seconds, *counts)


def end(worker: Up, number: int) -> None:
    """Send a signal to a server; for SIGKILL to its children as well."""
    everyone = worker.tree() if number == signal.SIGKILL else [worker.process]
    for process in everyone:
        process.send_signal(number)


async def with_router(
    command: str, use: Callable[[aiohttp.ClientSession, list[Up]], Awaitable[None]]
) -> None:
    with running(replica(free_port())) as one, running(replica(free_port())) as other:
        workers = [one, other]
        with routed(command, [worker.url for worker in workers]) as url:
            wait_for_a_token(url, MODEL)
            timeout = aiohttp.ClientTimeout(total=60)
            async with aiohttp.ClientSession(url, timeout=timeout) as session:
                await use(session, workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("routers", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--out", type=Path, default=Path("routers.json"))
    arguments = parser.parse_args()
    results = []
    for router in arguments.routers:
        name, _, command = router.partition("=")
        result = asyncio.run(measure(name, command))
        results.append(asdict(result))
        print(result, flush=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
