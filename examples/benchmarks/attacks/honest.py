"""The honest clients: a few streams at a time, of which only the times of chunks are kept."""

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp

from examples.benchmarks.attacks.catalog import WORDS

MAX_TOKENS = 2000


@dataclass
class HonestStreams:
    """Streams that are read until `is_over`; `gaps` are pairs of a chunk's time and its delay,
    `waits` those of the first chunks of requests."""

    session: aiohttp.ClientSession
    url: str
    model: str
    gaps: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_over: bool = False

    async def stream(self, number: int) -> None:
        """One request after another."""
        while not self.is_over:
            try:
                await self._request(number)
            except (aiohttp.ClientError, RuntimeError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def _request(self, number: int) -> None:
        """One request; each of its tokens is a chunk, since control tokens are sent as text."""
        body = {
            "model": self.model, "prompt": f"Client {number}. " + WORDS * 2, "stream": True,
            "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0,
            "skip_special_tokens": False,
        }  # fmt: skip
        last: float | None = None
        sent = time.perf_counter()
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                if b'"error"' in piece:
                    raise RuntimeError(piece[:300].decode(errors="replace"))
                if last is None:
                    self.waits.append((now, now - sent))
                else:
                    self.gaps.append((now, now - last))
                last = now
                if self.is_over:
                    return

    def between(self, start: float, end: float) -> list[float]:
        """The sorted delays of chunks that arrived between two moments."""
        return sorted(gap for at, gap in self.gaps if start <= at <= end)

    def longest_wait(self, start: float, end: float) -> float:
        """Seconds until the first chunk, of the requests that got it between two moments; 0.0 if
        there are none."""
        return max((wait for at, wait in self.waits if start <= at <= end), default=0.0)
