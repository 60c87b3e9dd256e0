"""Upgrade a server again and again under streams in constant load.

    python -m examples.benchmarks.server.upgrades --upgrades 200 --streams 64 --output FILE

Each client streams one completion after the other, over one HTTP client that keeps connections.
Every text must be the one that an undisturbed server gave for the same seed. A gap is the time
between two events of one stream, or from a request to its first event; reported are the longest gap
of each stream during the upgrades, and of as many streams without an upgrade before.
"""

import argparse
import asyncio
import json
import ssl
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.certificates import make_certificate
from tests.conftest import Server, read_url, start_server

PROMPTS = 8  # different requests; each has one text
TOKENS = 48


@dataclass
class Load:
    """What the clients have seen."""

    complete: int = 0
    lost: list[str] = field(default_factory=list)
    different: int = 0
    longest_gaps: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        """Counts, and quantiles of the longest gap of each stream in seconds."""
        gaps = sorted(self.longest_gaps)
        at = {
            f"gap_p{q}": round(gaps[min(len(gaps) - 1, len(gaps) * q // 100)], 3) for q in (50, 99)
        }
        counts = {"complete": self.complete, "lost": len(self.lost), "different": self.different}
        return {**counts, **at, "gap_max": round(gaps[-1], 3), "errors": self.lost[:5]}


def body_of(number: int) -> dict[str, object]:
    """A request whose text is fixed by its seed."""
    return {
        "model": "builtin", "prompt": f"Story {number}:", "max_tokens": TOKENS, "seed": number,
        "temperature": 0.9, "ignore_eos": True, "stream": True,
    }  # fmt: skip


async def stream(session: aiohttp.ClientSession, url: str, number: int, load: Load) -> str | None:
    """One text, and its longest gap; None if the request was lost."""
    text, last, longest, is_done = "", time.perf_counter(), 0.0, False
    try:
        async with session.post(f"{url}/v1/completions", json=body_of(number)) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                    continue
                text += "".join(each["text"] for each in json.loads(line[6:])["choices"])
    except (aiohttp.ClientError, OSError, KeyError) as error:
        load.lost.append(repr(error))
        return None
    if not is_done:
        load.lost.append("the stream ended without [DONE]")
        return None
    load.complete += 1
    load.longest_gaps.append(longest)
    return text


async def client(
    session: aiohttp.ClientSession, url: str, texts: Sequence[str], at: int, load: Load,
    stop: asyncio.Event,
) -> None:  # fmt: skip
    """Stream one text after the other until `stop`."""
    number = at % PROMPTS
    while not stop.is_set():
        text = await stream(session, url, number, load)
        load.different += text is not None and text != texts[number]
        number = (number + 1) % PROMPTS


async def upgrade(server: Server) -> bool:
    """Upgrade; again while the server before still finishes. Whether it has succeeded."""
    command = [sys.executable, "-m", "gateway", "upgrade", "--pid", str(server.pid)]
    while True:
        run = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await run.communicate()
        if run.returncode == 0:
            return True
        if b"still finishes" not in errors:
            sys.stderr.write(errors.decode())
            return False
        await asyncio.sleep(0.2)


async def measure(args: argparse.Namespace, server: Server, url: str) -> dict[str, object]:
    """Load without upgrades, and with them."""
    trusted = ssl._create_unverified_context() if args.tls else True
    connector = aiohttp.TCPConnector(limit=0, ssl=trusted)
    async with aiohttp.ClientSession(connector=connector) as session:
        texts = [await stream(session, url, number, Load()) or "" for number in range(PROMPTS)]
        results: dict[str, object] = {}
        num_upgrades, took = 0, []
        for name in ("undisturbed", "upgraded"):
            load, stop = Load(), asyncio.Event()
            clients = [
                asyncio.create_task(client(session, url, texts, at, load, stop))
                for at in range(args.streams)
            ]
            if name == "undisturbed":
                await asyncio.sleep(10)
            deadline = time.perf_counter() + args.seconds
            while name == "upgraded" and num_upgrades < args.upgrades:
                began = time.perf_counter()
                if began > deadline or not await upgrade(server):
                    break
                num_upgrades += 1
                took.append(time.perf_counter() - began)
            stop.set()
            await asyncio.gather(*clients)
            results[name] = load.summary()
    took.sort()
    seconds = round(took[len(took) // 2], 2) if took else None
    return {"upgrades": num_upgrades, "upgrade_seconds_p50": seconds, **results}


def main() -> None:
    """Run, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrades", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no upgrade after that")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        flags = ["--cost-model", "none", "--threads", "1", "--kv-slots", "32768"]
        if args.tls:
            certificate, key = make_certificate(directory, "upgrades")
            flags += ["--tls-cert", str(certificate), "--tls-key", str(key)]
        with start_server(directory, *flags) as server:
            url = read_url(server)
            result = asyncio.run(measure(args, server, url))
            server.terminate()
            result["exit_code"] = server.wait(60)
    result |= {"streams": args.streams, "tls": args.tls, "tokens": TOKENS}
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
