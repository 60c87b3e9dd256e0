"""Fuzz a served model over real sockets, then run schemathesis against it; says what was left.

    python -m tests.fuzz_server [--bodies 20000] [--examples 100] [--model builtin] [--seed 0]

Ends with 1 if any request hung, got a 5xx that is no honest one, or left blocks or files behind.
"""

import argparse
import asyncio
import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import aiohttp
import psutil

from tests.conftest import read_url, start_server
from tests.fuzzing import Fuzzer, Sent, is_honest
from tests.serving.client import until_idle

AT_ONCE = 16
PATIENCE = 120.0  # seconds; past them a request counts as hung
CONTEXT = "96"  # tokens: answers to what says no length end soon

say = logging.getLogger("fuzz").info


class Size(NamedTuple):
    """What the server holds."""

    files: int
    megabytes: float

    @classmethod
    def of(cls, pid: int) -> "Size":
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.memory_info().rss / 2**20)


class Tally:
    """How the requests ended."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.wrong: list[tuple[str, Sent]] = []
        self.slowest = 0.0

    async def send(self, session: aiohttp.ClientSession, url: str, sent: Sent) -> None:
        began = time.perf_counter()
        headers = {"content-type": "application/json"}
        try:
            async with session.post(url + sent.path, data=sent.body, headers=headers) as response:
                await response.read()
            status, is_right = str(response.status), is_honest(response.status, sent)
        except (aiohttp.ClientError, TimeoutError) as error:
            status, is_right = type(error).__name__, False
        self.statuses[status] += 1
        self.slowest = max(self.slowest, time.perf_counter() - began)
        if not is_right:
            self.wrong.append((status, sent))


async def fuzz(url: str, pid: int, arguments: argparse.Namespace) -> bool:
    """Send the bodies; whether all went well and nothing is left."""
    tally = Tally()
    limit = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(timeout=limit) as session:
        async with session.get(f"{url}/openapi.json") as response:
            document = await response.json()
        fuzzer = Fuzzer(document, arguments.model, Random(arguments.seed))
        await _all(session, url, (fuzzer.request() for _ in range(500)), Tally())
        await until_idle(session, url)
        before = Size.of(pid)
        began = time.perf_counter()
        await _all(session, url, (fuzzer.request() for _ in range(arguments.bodies)), tally)
        seconds = time.perf_counter() - began
        counts = await until_idle(session, url)
        after = Size.of(pid)
    left = {
        name: counts[name]
        for name in (
            "podway_orphan_blocks",
            "podway_kv_slots/state=held/tier=device",
            "podway_worker_restarts_total",
        )
    }
    say("%d bodies in %.0f s: %s", arguments.bodies, seconds, dict(sorted(tally.statuses.items())))
    say("slowest %.2f s; left: %s; before %s, after %s", tally.slowest, left, before, after)
    for status, sent in tally.wrong[:20]:
        say("WRONG %s %s %r", status, sent.path, sent.body[:2000])
    return not tally.wrong and not any(left.values()) and after.files <= before.files


async def _all(
    session: aiohttp.ClientSession, url: str, requests: Iterator[Sent], tally: Tally
) -> None:
    async def work() -> None:
        for sent in requests:
            await tally.send(session, url, sent)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def run_schemathesis(url: str, num_examples: int) -> bool:
    """The tool's own command; whether it found nothing."""
    tool = str(Path(sys.executable).with_name("schemathesis"))
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance,negative_data_rejection"
    )
    command = [tool, "run", f"{url}/openapi.json", "--checks", checks, "--seed", "1"]
    options = ["--max-examples", str(num_examples), "--phases", "examples,coverage,fuzzing"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True)
    say("%s", ended.stdout[-3000:])
    return ended.returncode == 0


def main(arguments: argparse.Namespace) -> int:
    """Start a server, fuzz it, stop it."""
    flags = ("--max-model-len", CONTEXT, "--log-level", "warning")
    model = [] if arguments.model == "builtin" else [arguments.model]
    with (
        tempfile.TemporaryDirectory() as directory,
        start_server(Path(directory), *model, *flags) as server,
    ):
        url = read_url(server)
        is_well = asyncio.run(fuzz(url, server.pid, arguments))
        if arguments.examples:
            is_well = run_schemathesis(url, arguments.examples) and is_well
        server.send_signal(signal.SIGTERM)
        is_well = server.wait(60) == 0 and is_well
        say("log: %s", json.dumps(server.log.read_text()[-1000:]))
    return not is_well


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--bodies", type=int, default=20_000)
    flags.add_argument("--examples", type=int, default=100)
    flags.add_argument("--model", default="builtin")
    flags.add_argument("--seed", type=int, default=0)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main(flags.parse_args()))
