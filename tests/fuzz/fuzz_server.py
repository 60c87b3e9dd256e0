"""Fuzz a served model over real sockets, every operation but the endless one.

    python -m tests.fuzz.fuzz_server [--bodies 20000] [--examples 100] [--model builtin] [--seed 0]
                                [--out FILE]

After that schemathesis runs `--examples` against it. Exits with 1 if a request hung or got a 5xx
(but 503, or 504 for its own deadline), or if blocks or descriptors were left. `--out` keeps counts
by operation and status as JSON; counts that the file has already are added to, so that a long run
can be done in slices with different seeds.
"""

import argparse
import asyncio
import json
import logging
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import NamedTuple

import aiohttp
import psutil
from yarl import URL

from tests.conftest import read_url, start_server
from tests.fuzz.fuzzing import Fuzzer, Sent, is_honest
from tests.serving.client import until_idle

AT_ONCE = 16
IDENTIFIER = re.compile(rb'"id": ?"([\w-]{4,80})"')
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
        self.operations: dict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: list[tuple[str, Sent]] = []
        self.slowest = 0.0

    async def send(
        self, session: aiohttp.ClientSession, url: str, fuzzer: Fuzzer, sent: Sent
    ) -> None:
        began = time.perf_counter()
        headers = {"content-type": sent.content_type} if sent.content_type else {}
        target = URL(url + sent.path, encoded=True)
        try:
            async with session.request(
                sent.method, target, data=sent.body, headers=headers
            ) as response:
                content = await response.read()
            status, is_right = str(response.status), is_honest(response.status, sent)
            for identifier in IDENTIFIER.findall(content[:2000]):
                fuzzer.learn(identifier.decode())
        except (aiohttp.ClientError, TimeoutError) as error:
            status, is_right = type(error).__name__, False
        self.statuses[status] += 1
        self.operations[sent.operation][status] += 1
        self.slowest = max(self.slowest, time.perf_counter() - began)
        if not is_right:
            self.wrong.append((status, sent))

    def write(self, path: Path) -> None:
        """Add the counts to those of the file."""
        known = json.loads(path.read_text()) if path.exists() else {}
        operations = {name: Counter(counts) for name, counts in known.get("operations", {}).items()}
        for operation, statuses in self.operations.items():
            operations[operation] = operations.get(operation, Counter()) + statuses
        result = {
            "requests": known.get("requests", 0) + sum(self.statuses.values()),
            "wrong": known.get("wrong", 0) + len(self.wrong),
            "operations": {
                name: dict(sorted(operations[name].items())) for name in sorted(operations)
            },
        }
        path.write_text(json.dumps(result, indent=1) + "\n")


async def fuzz(url: str, pid: int, arguments: argparse.Namespace) -> bool:
    """Send the bodies; whether all went well and nothing is left."""
    tally = Tally()
    limit = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(timeout=limit) as session:
        async with session.get(f"{url}/openapi.json") as response:
            document = await response.json()
        fuzzer = Fuzzer(document, arguments.model, Random(arguments.seed))
        await _start_compiler(session, url, arguments.model)
        await _all(session, url, fuzzer, 500, Tally())
        await until_idle(session, url)
        before = Size.of(pid)
        began = time.perf_counter()
        await _all(session, url, fuzzer, arguments.bodies, tally)
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
        say("WRONG %s %s %s %r", status, sent.method, sent.path, sent.body[:2000])
    if arguments.out is not None:
        tally.write(arguments.out)
    return not tally.wrong and not any(left.values()) and after.files <= before.files


async def _start_compiler(session: aiohttp.ClientSession, url: str, model: str) -> None:
    """Constrain an output, since the process that compiles grammars starts when it is needed."""
    body = {"model": model, "prompt": "x", "max_tokens": 1, "guided_choice": ["a"]}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()


async def _all(
    session: aiohttp.ClientSession, url: str, fuzzer: Fuzzer, count: int, tally: Tally
) -> None:
    requests = (fuzzer.any_request() for _ in range(count))

    async def work() -> None:
        for sent in requests:
            await tally.send(session, url, fuzzer, sent)

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
    flags.add_argument("--out", type=Path, help="add the counts to this JSON file")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main(flags.parse_args()))
