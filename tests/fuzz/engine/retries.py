"""Cases whose clients give up while their prompt is computed, and send it again.

Memory is ample and no step fails: so each retry must go on where the attempt before stopped, up to
the block that was not full and, with recurrent layers, up to the newest snapshot. What the retry
reads is checked like all else. `python -m tests.fuzz.engine.retries FIRST LAST` plays more cases.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from engine.control.admission import Admission
from engine.kv import request_states
from engine.request import RequestSpec
from engine.step import SamplingParams
from tests.fuzz.engine.answers import RowRates
from tests.fuzz.engine.case import Case
from tests.fuzz.engine.clients import Clients, Received
from tests.fuzz.engine.drawing import ClientRates, Settings, draw
from tests.fuzz.engine.executor import StepRates
from tests.fuzz.engine.wrong import Wrong
from tests.fuzz.playing import main

if TYPE_CHECKING:
    from engine.loop import Engine
    from engine.request import Request

PROMPT_LEN, MODEL_LEN = 120, 160
SNAPSHOT_TOKENS = 8  # so that these prompts have many
MAX_ATTEMPTS = 6


@dataclass(slots=True)
class _Attempt:
    """A request whose client has left. `is_settled`: its last iterations have returned, too."""

    request: "Request"
    num_planned: int = 0  # tokens that were computed or in flight when the client left
    is_settled: bool = False

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in the cache."""
        return max(self.request.num_computed, self.num_planned if self.is_settled else 0)


class RetryCase(Case):
    """One case: sessions one after the other, each with a prompt that is sent again and again."""

    def _draw_settings(self) -> Settings:
        choose = self.random.choice
        settings = draw(self.random)
        while not settings.windows:  # an encoder keeps nothing
            settings = draw(self.random)
        tokens = choose([3, 8, 20, 40])
        scheduler = replace(
            settings.scheduler,
            max_model_len=MODEL_LEN,
            max_batch_size=min(tokens, settings.scheduler.max_batch_size),
            max_batch_tokens=tokens,
            chunks_prompts=True,
            reuses_prefixes=True,
            admission=Admission.GROW,
            max_queue_requests=2048,
            max_queue_tokens=1 << 20,
            itl_goal=inf,
            max_step_seconds=inf,
        )
        blocks = 4 * len(settings.windows) * MODEL_LEN // settings.block_size
        tiers = replace(
            settings.tiers,
            device=blocks,
            host=0,
            disk=0,
            store=0,
            saves_on_host=False,
            states=choose([12, 20, 60]) if settings.tiers.states else 0,
            host_states=0,
            disk_states=0,
        )
        return replace(
            settings,
            scheduler=scheduler,
            tiers=tiers,
            rows=RowRates(),
            steps=StepRates(),
            clients=ClientRates(cancel=0.0, kill=0.0, switch=0.0, gap=0.0),
            num_requests=self.random.randint(1, 3),
            has_loras=False,
            method=None,
        )

    def _make_clients(self) -> Clients:
        return RetryClients(self)

    def kill(self) -> None:
        """The worker dies."""
        self._executor.kill()


class RetryClients(Clients):
    """One session after the other."""

    def __init__(self, case: RetryCase) -> None:
        super().__init__(case.settings, case.random, case.counts)
        self._case = case

    async def run(self, engine: "Engine") -> None:
        for _ in range(self._settings.num_requests):
            await self._session(engine)

    async def _session(self, engine: "Engine") -> None:
        """Attempts that end early, then one that does not; each sends the same prompt or a longer
        one."""
        random, choose = self._random, self._random.choice
        prompt = self._tokens(random.randint(2, PROMPT_LEN))
        before: _Attempt | None = None
        for number in range(MAX_ATTEMPTS):
            spec = RequestSpec(prompt, random.randint(1, 10), SamplingParams())
            seconds = None if number + 1 == MAX_ATTEMPTS else choose([0.01, 0.03, 0.1, 0.3, 1.0])
            before = await self._attempt(engine, spec, seconds, before)
            if random.random() < 0.5:
                await asyncio.sleep(100.0)  # iterations in flight return
                before.is_settled = True
            if random.random() < 0.15:
                self._case.kill()
                before = None
                await asyncio.sleep(choose([0.0, 10.0]))
            if random.random() < 0.4:
                prompt += self._tokens(random.randint(1, 10))
        self._counts["sessions"] += 1

    async def _attempt(
        self, engine: "Engine", spec: RequestSpec, seconds: float | None, before: _Attempt | None
    ) -> _Attempt:
        """Send a prompt, and leave after so many seconds."""
        while engine.rejection() is not None:  # noqa: ASYNC110 # virtual time
            await asyncio.sleep(1.0)  # the worker restarts
        least = 0 if before is None else self._least_kept(before, spec)
        received = Received()
        with engine.stream(spec) as stream:
            request = stream.request
            attempt = _Attempt(request)
            try:
                async with asyncio.timeout(seconds):
                    await self._read(stream, None, received)
            except TimeoutError:
                attempt.num_planned = request.num_planned
                self._counts["left in flight" if request.num_in_flight else "left"] += 1
        self._check(request, received)
        self.results[request.request_id] = tuple(received.tokens), received.finish
        if request.times.admitted_at is not None and request.num_cached < least:
            raise Wrong(
                f"a retry of {request.prompt_len} tokens found {request.num_cached} in the cache, "
                f"not {least}"
            )
        self._counts["retries that found something"] += bool(least)
        return attempt

    def _least_kept(self, before: _Attempt, spec: RequestSpec) -> int:
        """The tokens of a prompt that are surely in the cache after the attempt before."""
        settings, size = self._settings, self._settings.block_size
        prompt_len = before.request.prompt_len
        num_computed = min(before.num_computed, prompt_len, len(spec.prompt) - 1)
        kept = num_computed // size * size
        if not settings.tiers.states:
            return kept
        shortest = -(-SNAPSHOT_TOKENS // size) * size
        return min(num_computed, prompt_len - 1) // shortest * shortest


@contextmanager
def many_snapshots() -> Iterator[None]:
    """Let prompts of a case have snapshots as close to each other as `SNAPSHOT_TOKENS`."""
    tokens = request_states.SNAPSHOT_TOKENS
    request_states.SNAPSHOT_TOKENS = SNAPSHOT_TOKENS
    try:
        yield
    finally:
        request_states.SNAPSHOT_TOKENS = tokens


def play(seed: int, counts: "Counter[str]") -> None:
    """Play the case of a seed, and count what happened in it."""
    case = RetryCase(seed)
    with many_snapshots():
        case.play()
    counts.update(case.counts)


if __name__ == "__main__":
    main(play)
