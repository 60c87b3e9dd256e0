"""A server for a benchmark, and what its /metrics say."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import aiohttp
import psutil


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[tuple[psutil.Process, str]]:
    """`podway serve` on a free port: its process and its address."""
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--log-level", "error"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = re.search(r"https?://\S+", server.stdout.readline())
            if address is None:
                raise SystemExit("the server did not start")
            yield psutil.Process(server.pid), address.group()
        finally:
            server.send_signal(signal.SIGTERM)


async def gauges(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The values of `/metrics` without labels, and the held KV slots."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    values = re.findall(r'^(\w+|podway_kv_slots\{state="held",tier="device"\}) (\S+)$', text, re.M)
    return {name: float(value) for name, value in values}


async def until_idle(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Poll /metrics until no request runs or waits; returns its values."""
    while True:
        counts = await gauges(session, url)
        if not counts["podway_requests_running"] and not counts["podway_requests_waiting"]:
            return counts
        await asyncio.sleep(0.05)
