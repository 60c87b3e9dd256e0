"""Two replicas of one server beside two servers behind a router, under the same chats.

Every replica and server has one thread. Chats have one of a few system prompts and several
messages; so many chats are open at any time, and the next message follows at once. Each round plays
all ways with fresh servers, in another order. Writes servers.json and servers.md.

    python -m examples.benchmarks.cluster.replicas --smg PATH [--model SHAPE] [--rounds 2]
        [--note "the machine"] [--out DIR]
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp

from engine.cost.live import quantile
from examples.benchmarks.cluster.routers import MODEL, free_port, routed
from examples.benchmarks.peers.servers import Server, running, wait_for_a_token
from examples.benchmarks.written import write_files

OUT = Path(__file__).parents[1] / "results" / "replicas"
CHATS, OPEN, MESSAGES, KINDS = 32, 8, 4, 12  # kinds: of system prompts
SYSTEM_WORDS, WORDS, OUTPUT_LEN = 80, 10, 16
KV_SLOTS = 16_384  # of each replica
SMG = "{smg} launch --host 127.0.0.1 --port {{port}} --prometheus-port {{metrics_port}} "
WAYS = {  # the policy of a router, if there is one
    "`--replicas 2`": "",
    "smg, cache_aware": "cache_aware",
    "smg, round_robin": "round_robin",
    "round robin by the client": "",
}


@dataclass(slots=True)
class Seen:
    """What the clients of one run have seen. Times are in seconds."""

    seconds: float = 0.0
    tokens: int = 0  # of prompts and outputs
    prompt: int = 0
    cached: int = 0
    failed: int = 0
    ttfts: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        ttfts = sorted(self.ttfts)
        return {
            "requests": len(ttfts),
            "failed": self.failed,
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "ttft_p50": round(quantile(ttfts, 0.5), 3),
            "ttft_p99": round(quantile(ttfts, 0.99), 3),
            "cached_share": round(self.cached / self.prompt, 4),
        }


def server(model: str, replicas: int) -> Server:
    """A server with one thread for each replica."""
    port = free_port()
    flags = f"--port {port} --served-model-name {MODEL} --threads 1 --store memory"
    flags += f" --replicas {replicas} --kv-slots {replicas * KV_SLOTS} --log-level error"
    command = (sys.executable, "-m", "gateway", "serve", model, *flags.split())
    return Server(f"{replicas} replicas", "", command, port, MODEL, {})


@contextmanager
def served(way: str, model: str, smg: str) -> Iterator[list[str]]:
    """The URLs to which a way sends the requests in turn."""
    with ExitStack() as stack:
        if "replicas" in way:
            yield [stack.enter_context(running(server(model, 2))).url]
            return
        urls = [stack.enter_context(running(server(model, 1))).url for _ in range(2)]
        if policy := WAYS[way]:
            command = f"{SMG.format(smg=smg)} --policy {policy} --worker-urls {{workers}}"
            urls = [stack.enter_context(routed(command, urls))]
            wait_for_a_token(urls[0], MODEL)
        yield urls


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, seen: Seen) -> None:
    """One streamed answer."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_LEN, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    began, first = time.perf_counter(), 0.0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            seen.failed += 1
            return
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                first = first or time.perf_counter() - began
                if usage := event.get("usage"):
                    seen.tokens += usage["total_tokens"]
                    seen.prompt += usage["prompt_tokens"]
                    seen.cached += usage["prompt_tokens_details"]["cached_tokens"]
    seen.ttfts.append(first)


def _words(random: Random, count: int) -> str:
    return " ".join(str(random.randrange(1000)) for _ in range(count))


async def chats(urls: Sequence[str]) -> Seen:
    """All chats, so many of them open at a time."""
    seen, turns, gate = Seen(), cycle(urls), asyncio.Semaphore(OPEN)
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)

    async def chat(session: aiohttp.ClientSession, number: int) -> None:
        prompt = _words(Random(number % KINDS), SYSTEM_WORDS)
        own = Random(KINDS + number)
        async with gate:
            for _ in range(MESSAGES):
                prompt += "\n" + _words(own, WORDS)
                await ask(session, next(turns), prompt, seen)

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began = time.perf_counter()
        await asyncio.gather(*(chat(session, number) for number in range(CHATS)))
        seen.seconds = time.perf_counter() - began
    return seen


def page(found: Mapping[str, Any]) -> str:
    """servers.md of the results."""
    runs = found["runs"]
    lines = [
        "# Two replicas of one server, and two servers behind smg",
        "",
        f"`python -m examples.benchmarks.cluster.replicas`: `{found['model']}`, one thread for "
        "each replica or server;",
        f"{found['note']} ([JSON](servers.json)). {CHATS} chats of {MESSAGES} messages, {OPEN} of "
        f"them open at any time;",
        f"{KINDS} system prompts of {SYSTEM_WORDS} numbers. Medians of {len(runs)} rounds, with "
        "fresh servers in each; in brackets the least",
        "and the most. Tokens are those of prompts and outputs. The servers, smg 1.13 from PyPI "
        "and the clients share the cores.",
        "",
        "| | tokens/s | TTFT p50, s | TTFT p99, s | prompt tokens cached | failed |",
        "|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        rows = [run[way] for run in runs]
        at = {name: median(row[name] for row in rows) for name in rows[0]}
        paces = sorted(row["tokens_per_second"] for row in rows)
        lines.append(
            f"| {way} | {at['tokens_per_second']:,.0f} ({paces[0]:,.0f} to {paces[-1]:,.0f}) "
            f"| {at['ttft_p50']:.2f} | {at['ttft_p99']:.2f} "
            f"| {at['cached_share']:.1%} | {at['failed']:g} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Play all ways in each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smg", default="smg", help="the command of smg 1.13")
    parser.add_argument("--model", default="random:M110")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--note", default="", help="the machine")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for number in range(args.rounds):
        rows = {}
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            with served(way, args.model, args.smg) as urls:
                rows[way] = asyncio.run(chats(urls)).row()
            sys.stdout.write(f"{way}: {rows[way]}\n")
            sys.stdout.flush()
        runs.append(rows)
    found = {"model": args.model, "note": args.note, "runs": runs}
    write_files(args.out, {"servers.json": found, "servers.md": page(found)})


if __name__ == "__main__":
    main()
