"""Tokens per second of a whole server whose model costs almost nothing.

    python -m examples.benchmarks.server.front_end CHECKPOINT [-c 64] [-n 512] [--prompt-tokens 32]
                                    [--output-tokens 64] [--highest-id 30000] [--json FILE]

CHECKPOINT should be tiny, for example a Llama with 2 layers: the model's time is included. Closed
loop: each of C clients sends its next request when the last one has ended, over a new connection.
Two clients alternate: `podway bench`, which parses every event, and a raw one, which only searches
for the last. The CPU seconds are those of the server's processes.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil
import uvloop

from examples.benchmarks.server.served import serving

MODEL = "m"
LOWEST_ID = 100  # of random prompts; lower ids are special tokens


@dataclass(frozen=True, slots=True)
class Rate:
    """The result of a run; CPU time in microseconds per output token."""

    tokens_per_second: float
    seconds: float
    loop_microseconds: float
    worker_microseconds: float


def cpu_seconds(loop: psutil.Process) -> tuple[float, float]:
    """CPU seconds of the event loop's process, and of its workers."""
    workers = [sum(child.cpu_times()[:2]) for child in loop.children(recursive=True)]
    return sum(loop.cpu_times()[:2]), sum(workers)


def measured(server: psutil.Process, num_tokens: int, run: Callable[[], float]) -> Rate:
    """The CPU time per token of a load; `run` sends it and returns its seconds."""
    loop_before, workers_before = cpu_seconds(server)
    seconds = run()
    loop, workers = cpu_seconds(server)
    per_token = 1e6 / num_tokens
    return Rate(
        num_tokens / seconds,
        seconds,
        (loop - loop_before) * per_token,
        (workers - workers_before) * per_token,
    )


def with_bench(url: str, load: argparse.Namespace) -> float:
    """`podway bench`; raises if a request failed."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        command = [sys.executable, "-m", "gateway", "bench", url, "--new-connections"]
        lengths = ["--prompt-tokens", str(load.prompt_tokens)]
        lengths += ["--output-tokens", str(load.output_tokens)]
        counts = ["-c", str(load.c), "-n", str(load.n), "--json", report.name]
        subprocess.run([*command, *lengths, *counts], check=True, stdout=subprocess.DEVNULL)
        result = json.loads(report.read())
    assert result["num_failed"] == 0, result
    return float(result["wall_seconds"])


def with_raw(url: str, load: argparse.Namespace) -> float:
    """Clients that discard what they receive, in a separate process."""
    command = [sys.executable, "-m", "examples.benchmarks.server.front_end", url, "--raw"]
    counts = ["-c", str(load.c), "-n", str(load.n)]
    lengths = ["--prompt-tokens", str(load.prompt_tokens)]
    lengths += ["--output-tokens", str(load.output_tokens), "--highest-id", str(load.highest_id)]
    ended = subprocess.run(
        [*command, *counts, *lengths], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(ended.stdout)


async def raw(url: str, load: argparse.Namespace) -> float:
    """The seconds of the load, sent by raw clients."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    requests = _requests(load)

    class Client(asyncio.Protocol):
        def __init__(self) -> None:
            self.ended = asyncio.Event()
            self._tail = b""

        def data_received(self, data: bytes) -> None:
            if not self._tail and not data.startswith(b"HTTP/1.1 200 "):
                raise SystemExit(f"the server rejects the request: {data[:300]!r}")
            self._tail = (self._tail + data)[-64:]
            if b"data: [DONE]" in self._tail:
                self.ended.set()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for request in requests:
            transport, client = await loop.create_connection(Client, host, int(port))
            transport.write(request)
            await client.ended.wait()
            transport.abort()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(load.c)))
    return time.perf_counter() - began


def _requests(load: argparse.Namespace) -> Iterator[bytes]:
    chance = random.Random(0)
    for _ in range(load.n):
        prompt = [chance.randrange(LOWEST_ID, load.highest_id) for _ in range(load.prompt_tokens)]
        params = {"model": MODEL, "prompt": prompt, "max_tokens": load.output_tokens}
        body = json.dumps(params | {"stream": True, "ignore_eos": True, "temperature": 0}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        yield head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def main(load: argparse.Namespace) -> None:
    """Warm up, measure with both clients alternately, print the table."""
    flags = [load.target, "--served-model-name", MODEL, "--max-model-len", "2048"]
    with serving(flags) as (server, url):
        with_raw(url, load)
        num_tokens = load.n * load.output_tokens
        rates = {
            f"{name}, {which}": measured(server, num_tokens, partial(run, url, load))
            for which in ("first", "second")
            for name, run in (("bench", with_bench), ("raw", with_raw))
        }
    print(f"{'client':16}{'tokens/s':>10}{'seconds':>10}{'loop us/token':>15}{'workers':>10}")
    for name, rate in rates.items():
        print(
            f"{name:16}{rate.tokens_per_second:10.0f}{rate.seconds:10.2f}"
            f"{rate.loop_microseconds:15.1f}{rate.worker_microseconds:10.1f}"
        )
    print(f"load average {' '.join(f'{part:.1f}' for part in os.getloadavg())}")
    if load.json:
        results = {name: asdict(rate) for name, rate in rates.items()}
        Path(load.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("target", metavar="CHECKPOINT")
    flags.add_argument("-c", type=int, default=64)
    flags.add_argument("-n", type=int, default=512)
    flags.add_argument("--prompt-tokens", type=int, default=32)
    flags.add_argument("--output-tokens", type=int, default=64)
    flags.add_argument("--highest-id", type=int, default=30_000, help="of random prompts")
    flags.add_argument("--json")
    flags.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.raw:
        print(uvloop.run(raw(given.target, given)))
    else:
        main(given)
