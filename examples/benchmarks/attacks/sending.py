"""What the attacks share: HTTP requests in a loop, and raw bytes on a socket."""

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

Json = dict[str, Any]
SOURCE = "127.0.0.2"  # the attacker's address; other clients have another one


def trusting() -> ssl.SSLContext:
    """For the benchmark's own certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@dataclass
class Attacker:
    """One attacking client: the server, when to stop, and the outcomes so far."""

    session: aiohttp.ClientSession
    url: str
    model: str
    ends_at: float  # of time.perf_counter
    outcomes: Counter[str] = field(default_factory=Counter)  # by status or by exception

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.ends_at

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    async def connect(
        self, tls: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection of the attacker's own address."""
        return await asyncio.open_connection(*self.address, local_addr=(SOURCE, 0), ssl=tls)

    async def until_over(self) -> None:
        """Wait for the end of the attack."""
        await asyncio.sleep(max(0.0, self.ends_at - time.perf_counter()))

    async def send(self, method: str, path: str, data: bytes | None = None) -> None:
        """Send a request, JSON if it has a body, and read the whole response."""
        headers = {"content-type": "application/json"}
        try:
            async with self.session.request(
                method, self.url + path, data=data, headers=headers
            ) as response:
                self.outcomes[str(response.status)] += 1
                await response.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            self.outcomes[type(error).__name__] += 1

    async def post(self, path: str, body: Json, headers: dict[str, str] | None = None) -> Json:
        """Send JSON; returns the decoded response, {} for one that is no JSON object."""
        try:
            async with self.session.post(self.url + path, json=body, headers=headers) as response:
                self.outcomes[str(response.status)] += 1
                if response.content_type != "application/json":
                    await response.read()
                    return {}
                decoded: Json = await response.json()
                return decoded
        except (aiohttp.ClientError, ConnectionError) as error:
            self.outcomes[type(error).__name__] += 1
            return {}

    async def repeat(self, one: Callable[[int], Awaitable[object]], clients: int) -> None:
        """Call `one` with increasing numbers, `clients` at a time, until the attack is over."""
        numbers = iter(range(1 << 30))

        async def client() -> None:
            while not self.is_over:
                await one(next(numbers))

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())


Attack = Callable[[Attacker], Awaitable[object]]
