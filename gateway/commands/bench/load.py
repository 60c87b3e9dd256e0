"""Sends the requests of a load run, closed loop or open loop, and keeps what was seen of each.

A closed loop keeps a fixed number of requests in flight; an open loop sends when the shot says,
whatever the server does, so that queueing shows in the latencies. Times are of one monotonic
clock; the client does as little as it can between two reads.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from gateway.commands.bench.workload import RandomPrompts, Shot
from gateway.commands.http_client import DONE, EventDecoder, error_text, refusal, unreachable

_now = time.perf_counter
_JSON = {"Content-Type": "application/json"}


@dataclass(slots=True, eq=False)
class Outcome:
    """What the client saw of one request. Times in seconds; None until they happened."""

    shot: Shot
    sent_at: float
    first_at: float | None = None
    last_at: float | None = None
    finished_at: float | None = None  # the event with the finish reason
    ended_at: float | None = None
    gaps: list[float] = field(default_factory=list)  # between events with text
    num_events: int = 0  # with text
    usage_output: int | None = None
    usage_prompt: int | None = None
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def output_tokens(self) -> int:
        """As the server counts them, else one per event."""
        return self.num_events if self.usage_output is None else self.usage_output

    @property
    def prompt_tokens(self) -> int:
        return self.shot.prompt_tokens if self.usage_prompt is None else self.usage_prompt


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes and what every request says."""

    url: str
    session: aiohttp.ClientSession
    prompts: RandomPrompts
    params: dict[str, Any]
    is_chat: bool

    @property
    def endpoint(self) -> str:
        return f"{self.url}/v1/{'chat/' if self.is_chat else ''}completions"

    def body(self, shot: Shot) -> bytes:
        """The request of one shot."""
        prompt = self.prompts.of(shot)
        asked = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.is_chat
            else {"prompt": prompt}
        )
        usage = {"include_usage": True}
        return orjson.dumps(
            {"stream": True, "stream_options": usage, "max_tokens": shot.output_tokens}
            | asked
            | self.params
        )


Done = Callable[[Outcome], None]


async def closed_loop(target: Target, shots: Iterable[Shot], concurrency: int, done: Done) -> None:
    """Keep `concurrency` requests in flight until the shots are used up."""
    waiting = iter(shots)

    async def keep_busy() -> None:
        for shot in waiting:
            done(await send(target, shot, target.body(shot)))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(keep_busy())


async def open_loop(target: Target, shots: Iterable[Shot], done: Done) -> float:
    """Send every shot at its time. Returns by how many seconds the latest was sent late."""
    late = 0.0

    async def fire(shot: Shot, body: bytes) -> None:
        done(await send(target, shot, body))

    async with asyncio.TaskGroup() as group:
        started_at = _now()
        for shot in shots:
            body = target.body(shot)
            await asyncio.sleep(max(0.0, started_at + shot.at - _now()))
            late = max(late, _now() - started_at - shot.at)
            group.create_task(fire(shot, body))
    return late


async def send(target: Target, shot: Shot, body: bytes) -> Outcome:
    """One request, from the connection to the end of its stream. Never raises for the server."""
    seen = Outcome(shot, sent_at=_now())
    try:
        async with target.session.post(target.endpoint, data=body, headers=_JSON) as response:
            if response.status == 200:
                await _watch(response, seen)
            else:
                seen.error = refusal(response.status, await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        seen.error = unreachable(target.url, error)
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        seen.error = "the server sent an event that is not a completion chunk"
    seen.ended_at = _now()
    if seen.error is None and (seen.first_at is None or seen.finished_at is None):
        seen.error = "the stream ended early"
    return seen


async def _watch(response: aiohttp.ClientResponse, seen: Outcome) -> None:
    """Read the stream to its end and note every event at the moment its bytes came."""
    frames = EventDecoder()
    async for chunk in response.content.iter_any():
        at = _now()
        for data in frames.feed(chunk):
            if data != DONE:
                _note(orjson.loads(data), at, seen)
            elif seen.finished_at is None:
                seen.finished_at = at


def _note(event: dict[str, Any], at: float, seen: Outcome) -> None:
    if "error" in event:
        seen.error = error_text(event["error"])
    if usage := event.get("usage"):
        seen.usage_output = usage.get("completion_tokens")
        seen.usage_prompt = usage.get("prompt_tokens")
    for choice in event.get("choices") or ():
        if choice.get("finish_reason") is not None:
            seen.finished_at = at
        if _brings_token(choice):
            seen.num_events += 1
            if seen.last_at is None:
                seen.first_at = at
            else:
                seen.gaps.append(at - seen.last_at)
            seen.last_at = at


def _brings_token(choice: dict[str, Any]) -> bool:
    """Text, or an event that says nothing because a character is still incomplete."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    text = delta.get("content") or delta.get("reasoning_content")
    if "role" in delta or choice.get("finish_reason") is not None:
        return bool(text)
    return bool(text) or "content" in delta
