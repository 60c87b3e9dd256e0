"""The honest clients: streams, of which only the times of chunks are kept, and short requests.

Each has an address of its own.
"""

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp

from examples.benchmarks.attacks.catalog import WORDS
from examples.benchmarks.attacks.sending import trusting

MAX_TOKENS = 2000
REST_SECONDS = 0.02  # between two short requests
SHORT = 250  # the number of the client that sends them


def session_of(number: int) -> aiohttp.ClientSession:
    """A client's connections, from its address: 127.0.1.1 for number 0."""
    connector = aiohttp.TCPConnector(
        limit=0, ssl=trusting(), local_addr=(f"127.0.1.{number + 1}", 0)
    )
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)


@dataclass
class HonestStreams:
    """Streams that are read until `is_over`; `gaps` are pairs of a chunk's time and its delay,
    `waits` those of the first tokens of short requests."""

    url: str
    model: str
    gaps: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    last: dict[int, float] = field(default_factory=dict)  # when a stream's last chunk arrived
    is_over: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # a short request

    async def stream(self, number: int) -> None:
        """One request after another."""
        async with session_of(number) as session:
            while not self.is_over:
                try:
                    await self._request(session, number)
                except (aiohttp.ClientError, RuntimeError) as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.1)

    async def _request(self, session: aiohttp.ClientSession, number: int) -> None:
        """One request; each of its tokens is a chunk, since control tokens are sent as text."""
        body = {
            "model": self.model, "prompt": f"Client {number}. " + WORDS * 2, "stream": True,
            "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0,
            "skip_special_tokens": False,
        }  # fmt: skip
        last: float | None = None
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                if b'"error"' in piece:
                    raise RuntimeError(piece[:300].decode(errors="replace"))
                if last is not None:
                    self.gaps.append((now, now - last))
                self.last[number] = last = now
                if self.is_over:
                    return

    async def short_requests(self) -> None:
        """Requests of one token, each on a new connection, one after the other."""
        body = {"model": self.model, "prompt": "Hello", "max_tokens": 1, "stream": True}
        headers = {"connection": "close"}
        async with session_of(SHORT) as session:
            while not self.is_over:
                began = time.perf_counter()
                try:
                    async with session.post(
                        f"{self.url}/v1/completions", json=body, headers=headers
                    ) as response:
                        await response.content.readany()
                        if response.status != 200:
                            raise RuntimeError(f"a short request got status {response.status}")
                except (aiohttp.ClientError, RuntimeError) as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                now = time.perf_counter()
                self.waits.append((began, now - began))
                self.answered.set()
                await asyncio.sleep(REST_SECONDS)

    def between(self, start: float, end: float) -> list[float]:
        """The sorted delays of chunks that arrived between two moments."""
        return sorted(gap for at, gap in self.gaps if start <= at <= end)

    async def waits_between(self, start: float, end: float) -> list[float]:
        """The sorted times to the first token of the short requests that were sent between two
        moments; waits for the last of them."""
        self.answered.clear()
        await self.answered.wait()
        return sorted(wait for at, wait in self.waits if start <= at <= end)
