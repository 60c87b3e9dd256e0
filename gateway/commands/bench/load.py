"""Sends the requests of a load run, closed loop or open loop, and records the times of each.

A closed loop keeps a fixed number of requests in flight. An open loop sends each request at its
planned time, however busy the server is, so that queueing shows in the latencies. All times are of
one monotonic clock; the client does as little as possible between two reads.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from gateway.commands.bench.workload import PlannedRequest, RandomPrompts
from gateway.commands.http_client import (
    DONE,
    EventDecoder,
    connection_error,
    error_text,
    http_error,
)

_now = time.perf_counter
_JSON = {"Content-Type": "application/json"}


@dataclass(slots=True, eq=False)
class RequestResult:
    """Times and counts of one request. Times are seconds; None until the event has happened."""

    request: PlannedRequest
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
        """The server's count, or else the number of events with text."""
        return self.num_events if self.usage_output is None else self.usage_output

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens if self.usage_prompt is None else self.usage_prompt


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and the fields that all requests share."""

    url: str
    session: aiohttp.ClientSession
    prompts: RandomPrompts
    params: dict[str, Any]
    is_chat: bool

    @property
    def endpoint(self) -> str:
        return f"{self.url}/v1/{'chat/' if self.is_chat else ''}completions"

    def body(self, request: PlannedRequest) -> bytes:
        """The JSON body of a request."""
        prompt = self.prompts.of(request)
        fields = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.is_chat
            else {"prompt": prompt}
        )
        usage = {"include_usage": True}
        return orjson.dumps(
            {"stream": True, "stream_options": usage, "max_tokens": request.output_tokens}
            | fields
            | self.params
        )


Done = Callable[[RequestResult], None]


async def closed_loop(
    target: Target, requests: Iterable[PlannedRequest], concurrency: int, done: Done
) -> None:
    """Keep `concurrency` requests in flight until all have been sent."""
    waiting = iter(requests)

    async def send_next() -> None:
        for request in waiting:
            done(await send(target, request, target.body(request)))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(send_next())


async def open_loop(target: Target, requests: Iterable[PlannedRequest], done: Done) -> float:
    """Send each request at its planned time. Returns the largest delay of a send, in seconds."""
    late = 0.0

    async def send_one(request: PlannedRequest, body: bytes) -> None:
        done(await send(target, request, body))

    async with asyncio.TaskGroup() as group:
        started_at = _now()
        for request in requests:
            body = target.body(request)
            await asyncio.sleep(max(0.0, started_at + request.at - _now()))
            late = max(late, _now() - started_at - request.at)
            group.create_task(send_one(request, body))
    return late


async def send(target: Target, request: PlannedRequest, body: bytes) -> RequestResult:
    """Send one request and read its stream to the end. Failures are recorded, not raised."""
    outcome = RequestResult(request, sent_at=_now())
    try:
        async with target.session.post(target.endpoint, data=body, headers=_JSON) as response:
            if response.status == 200:
                await _read_stream(response, outcome)
            else:
                outcome.error = http_error(response.status, await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        outcome.error = connection_error(target.url, error)
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        outcome.error = "the server sent an event that is not a completion chunk"
    outcome.ended_at = _now()
    if outcome.first_at is None and outcome.usage_output:  # its tokens have no text
        outcome.first_at = outcome.finished_at
    if outcome.error is None and (outcome.first_at is None or outcome.finished_at is None):
        outcome.error = "the stream ended early"
    return outcome


async def _read_stream(response: aiohttp.ClientResponse, outcome: RequestResult) -> None:
    """Read the stream to its end and record each event with the time its bytes arrived."""
    decoder = EventDecoder()
    async for chunk in response.content.iter_any():
        at = _now()
        for data in decoder.feed(chunk):
            if data != DONE:
                _record(orjson.loads(data), at, outcome)
            elif outcome.finished_at is None:
                outcome.finished_at = at


def _record(event: dict[str, Any], at: float, outcome: RequestResult) -> None:
    if "error" in event:
        outcome.error = error_text(event["error"])
    if usage := event.get("usage"):
        outcome.usage_output = usage.get("completion_tokens")
        outcome.usage_prompt = usage.get("prompt_tokens")
    for choice in event.get("choices") or ():
        if choice.get("finish_reason") is not None:
            outcome.finished_at = at
        if _has_token(choice):
            outcome.num_events += 1
            if outcome.last_at is None:
                outcome.first_at = at
            else:
                outcome.gaps.append(at - outcome.last_at)
            outcome.last_at = at


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether the event stands for a token: it has text, or an incomplete character hides it."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    text = delta.get("content") or delta.get("reasoning_content")
    if "role" in delta or choice.get("finish_reason") is not None:
        return bool(text)
    return bool(text) or "content" in delta
