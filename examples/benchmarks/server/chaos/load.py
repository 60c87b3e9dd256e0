"""Clients that ask, hang up, read slowly and retry; each whole answer is compared with the one that
the same request got before anything failed."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from examples.benchmarks.server.chaos.requests import Asked, StreamedText, whole_text

RETRY_STATUSES = (429, 503)
RETRY_SECONDS = 0.3
MAX_TRIES = 400  # of one request; a worker that starts again takes seconds
BEHAVIOURS = {"reads": 0.6, "hangs up": 0.15, "stalls": 0.1, "reads whole": 0.15}


@dataclass
class Tally:
    """What the clients saw."""

    answers: Counter[str] = field(default_factory=Counter)  # whole and unchanged, by kind
    behaviours: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)  # by status or error
    failures: list[str] = field(default_factory=list)


class Interrupted(Exception):
    """The answer ended early, with an error that says to try again or with the connection."""


class Clients:
    """Sends requests at random moments, whether or not earlier ones have been answered."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, asked: Sequence[Asked], seed: int
    ) -> None:
        self.tally = Tally()
        self._session = session
        self._url = url
        self._asked = asked
        self._chance = random.Random(seed)
        self._expected: Mapping[int, str] = {}

    async def learn(self) -> None:
        """Ask each request once, undisturbed; raises `RuntimeError` if one is not answered."""
        expected: dict[int, str] = {}
        for number, asked in enumerate(self._asked):
            address = f"{self._url}{asked.path}"
            async with self._session.post(address, json=asked.body) as response:
                answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{asked.kind}: {response.status} {answer}")
            expected[number] = whole_text(asked.path, answer)
        self._expected = expected

    async def run(self, rate: float, seconds: float) -> None:
        """Begin `rate` requests per second for so long, and wait until all have ended."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        async with asyncio.TaskGroup() as tasks:
            while loop.time() < until:
                number = self._chance.randrange(len(self._asked))
                names, weights = zip(*BEHAVIOURS.items(), strict=True)
                (behaviour,) = self._chance.choices(names, weights)
                tasks.create_task(self._ask(number, behaviour, self._chance.random()))
                await asyncio.sleep(self._chance.expovariate(rate))

    async def _ask(self, number: int, behaviour: str, moment: float) -> None:
        asked = self._asked[number]
        self.tally.behaviours[behaviour] += 1
        for _ in range(MAX_TRIES):
            try:
                text = await self._try(asked, behaviour, moment)
            except (aiohttp.ClientError, ConnectionError, Interrupted) as error:
                self.tally.retries[str(error) or type(error).__name__] += 1
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if text is None:
                return
            if text != self._expected[number]:
                line = f"{asked.kind} ({behaviour}): {text}, not {self._expected[number]}"
                self.tally.failures.append(line)
            else:
                self.tally.answers[asked.kind] += 1
            return
        self.tally.failures.append(f"{asked.kind} ({behaviour}): no answer in {MAX_TRIES} tries")

    async def _try(self, asked: Asked, behaviour: str, moment: float) -> str | None:
        """The text of the answer; None if the client hung up. Raises `Interrupted`."""
        is_stream = behaviour != "reads whole"
        body = {**asked.body, "stream": is_stream}
        async with self._session.post(f"{self._url}{asked.path}", json=body) as response:
            if response.status in RETRY_STATUSES:
                raise Interrupted(str(response.status))
            if response.status != 200:
                detail = (await response.text())[:300]
                self.tally.failures.append(f"{asked.kind}: {response.status} {detail}")
                return None
            if not is_stream:
                return whole_text(asked.path, await response.json())
            return await self._read(response, asked, behaviour, moment)

    async def _read(
        self, response: aiohttp.ClientResponse, asked: Asked, behaviour: str, moment: float
    ) -> str | None:
        streamed, num_chunks = StreamedText(asked.body.get("n", 1)), 0
        leaves_after = round(moment * asked.body["max_tokens"])
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise Interrupted(chunk["error"].get("code") or "error event")
            streamed.add(chunk)
            num_chunks += 1
            if behaviour == "hangs up" and num_chunks > leaves_after:
                return None
            if behaviour == "stalls" and num_chunks == 3:
                await asyncio.sleep(2 * moment)
        if not streamed.is_whole:
            raise Interrupted("the stream ended early")
        return streamed.text
