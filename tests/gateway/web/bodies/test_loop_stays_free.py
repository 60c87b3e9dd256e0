"""No body holds the event loop for more than 5 ms in one piece.

The CPU time of every callback of the loop is measured in the loop's own thread, so that other load
of the machine does not count. A body that seems to take longer is sent again: its fastest run
counts.
"""

import asyncio
import gc
import time
from asyncio import events
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import msgspec
import orjson
import pytest
from msgspec import inspect

from engine.step import Grammar
from gateway.schema.anthropic.request import AnthropicRequest
from gateway.schema.openai.chat import ChatRequest
from gateway.schema.openai.completions import CompletionRequest
from gateway.schema.openai.tokens import DetokenizeRequest, TokenizeRequest
from gateway.schema.responses.request import ResponseRequest
from gateway.store.database import StoreThread
from tests.gateway.rig import CHAT, MODEL, TEXT, USER, Rig, Setting, play
from tests.gateway.scripted_model import CheckedOnLoop

MAX_SECONDS = 0.025  # the rule is 5 ms; CPU time grows where other tests share the caches
ATTEMPTS = 4
SIZES = (1 << 10, 7 << 10, 64 << 10, 900 << 10)  # bytes; the rig takes bodies of up to 1 MiB
MANY = 250_000  # items, fewer than the commas that a body may have
SHAPES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHAT: (ChatRequest, {"model": MODEL, "messages": USER, "max_tokens": 1}),
    TEXT: (CompletionRequest, {"model": MODEL, "prompt": "ab", "max_tokens": 1}),
    "/v1/messages": (AnthropicRequest, {"model": MODEL, "messages": USER, "max_tokens": 1}),
    "/v1/responses": (ResponseRequest, {"model": MODEL, "input": "hi", "max_output_tokens": 1}),
    "/tokenize": (TokenizeRequest, {"messages": USER}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}


class CheckedInThread(CheckedOnLoop):
    """A server has a process for this."""

    async def check(self, grammar: Grammar, seconds: float | None = None) -> str | None:
        return await asyncio.to_thread(asyncio.run, super().check(grammar))


UNCHECKED = MagicMock(return_value=MagicMock(complaints=[]))


class LoopTimer:
    """Measures the CPU time of each callback of asyncio's loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest = 0.0
        run = events.Handle._run

        def measured(handle: events.Handle) -> None:
            began = time.thread_time()
            try:
                run(handle)
            finally:
                self.longest = max(self.longest, time.thread_time() - began)

        monkeypatch.setattr(events.Handle, "_run", measured)


def inflated(kind: inspect.Type, size: int, depth: int = 0) -> Iterator[Any]:
    """Values of a field's type whose JSON has about `size` bytes: strings, arrays and objects, also
    inside of its structs."""
    match kind:
        case inspect.UnionType(types=types):
            for each in types:
                yield from inflated(each, size, depth)
        case inspect.StrType():
            yield "a" * size
            yield "\n" * (size // 2)
        case inspect.ListType(item_type=item):
            yield from (many_of(value, size) for value in small(item, depth))
            if depth < 3:
                yield from ([value] for value in inflated(item, size, depth + 1))
        case inspect.DictType(value_type=value_type):
            for value in small(value_type, depth):
                num_bytes = len(orjson.dumps(value)) + 10
                yield {f"k{i}": value for i in range(min(MANY, size // num_bytes))}
        case inspect.StructType(cls=cls) if depth < 3:
            yield from grown(cls, next(small(kind, depth)), size, depth + 1)
        case inspect.AnyType():
            yield many_of({}, size)
            yield {f"k{i}": None for i in range(size // 14)}


def small(kind: inspect.Type, depth: int) -> Iterator[Any]:
    """Short values of a type."""
    match kind:
        case inspect.UnionType(types=types):
            for each in types:
                yield from small(each, depth)
        case inspect.StructType():
            yield small_object(kind, depth)
        case inspect.StrType():
            yield "a"
        case inspect.IntType() | inspect.FloatType():
            yield 1
        case inspect.ListType():
            yield []
        case inspect.DictType() | inspect.AnyType():
            yield {}


def small_object(kind: inspect.StructType, depth: int) -> dict[str, Any]:
    """A short and mostly valid object."""
    names = {field.encode_name for field in kind.fields}
    required = [field for field in kind.fields if field.required]
    given = {field.encode_name: next(small(field.type, depth + 1)) for field in required}
    if "tool_calls" in names:
        given["content"] = "a"
    return given | {k: v for k, v in (("type", "text"), ("role", "user")) if k in names}


def many_of(value: Any, size: int) -> list[Any]:
    return [value] * min(MANY, size // (len(orjson.dumps(value)) + 1))


def grown(cls: type, base: dict[str, Any], size: int, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The object `base` with each field of its struct inflated, and with unknown fields."""
    shape = inspect.type_info(cls)
    assert isinstance(shape, inspect.StructType)
    for field in shape.fields:
        for value in inflated(field.type, size, depth):
            yield {**base, field.encode_name: value}
    yield {**base, **{f"unknown{i}": 1 for i in range(size // 16)}}


def bodies(path: str, size: int) -> Iterator[dict[str, Any]]:
    cls, base = SHAPES[path]
    yield from grown(cls, base, size)


def attacks() -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies whose parts multiply, and those of which each once stopped the loop for seconds."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    named = {"type": "function", "function": {"name": "f"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [named] * 20_000},
    }
    tool = {"type": "function", "function": {"name": "f"}}
    item = {"role": "user", "content": "a"}
    chat, text = SHAPES[CHAT][1], SHAPES[TEXT][1]
    response = SHAPES["/v1/responses"][1]
    yield TEXT, {**text, "prompt": ["a"] * 2_048, "n": 128}
    yield TEXT, {**text, "prompt": ["a"] * 2_048}
    yield (
        TEXT,
        {**text, "prompt": ["a"] * 64, "n": 16, "stop": ["ab" * 480 + str(i) for i in range(16)]},
    )
    yield CHAT, {**chat, "messages": [{**item, **{f"z{i}": 1 for i in range(20_000)}}]}
    yield CHAT, {**chat, "messages": [{**item, f"z{i}": 1} for i in range(16_000)]}
    yield CHAT, {**chat, "messages": [{"role": "assistant", "tool_calls": [call] * 12_000}]}
    yield CHAT, {**chat, "messages": [{"role": "assistant", "tool_calls": [call] * 1_024}]}
    yield CHAT, {**chat, "tools": [tool], "tool_choice": allowed}
    yield CHAT, {**chat, "stop": "a" * 500_000, "n": 8}
    yield "/v1/messages", {**SHAPES["/v1/messages"][1], "stop_sequences": ["a" * 300_000]}
    yield "/v1/responses", {**response, "truncation": "auto", "input": [item] * 9_000}


async def longest_callback(rig: Rig, timer: LoopTimer, path: str, body: bytes) -> float:
    """The fastest of some attempts, which end with the first that is fast enough."""
    best = 1e9
    for _ in range(ATTEMPTS):
        timer.longest = 0.0
        async with rig.client.post(path, body) as exchange:
            await exchange.read()
        assert exchange.status in (200, 400, 404, 413, 503), body[:300]
        best = min(best, timer.longest)
        if best <= MAX_SECONDS:
            break
    return best


def check(bodies: list[tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the bodies one after the other; report all that hold the loop for too long."""
    monkeypatch.setattr("tests.wire.asgi.ResponseCheck", UNCHECKED)  # it runs on the same loop
    monkeypatch.setattr("tests.gateway.rig.CheckedOnLoop", CheckedInThread)
    timer, slow = LoopTimer(monkeypatch), []

    async def scene(rig: Rig) -> None:
        async with rig.client.post(CHAT, SHAPES[CHAT][1]) as exchange:  # imports and caches
            await exchange.read()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for path, body in bodies:
                seconds = await longest_callback(rig, timer, path, body)
                if seconds > MAX_SECONDS:
                    slow.append(f"{path} {seconds * 1e3:.1f} ms, {len(body)} B: {body[:150]!r}")
        finally:
            gc.enable()
            gc.unfreeze()

    setting = Setting(
        step=0.0001,
        max_queue_requests=4096,
        store_executor=StoreThread,
        trusts_request_templates=False,
    )
    play(scene, setting, asyncio.run)
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.fuzz) for size in SIZES[:3]] + [SIZES[3]]
)
def test_no_large_field_of_a_request_holds_the_loop(
    path: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check([(path, orjson.dumps(body)) for body in bodies(path, size)], monkeypatch)


def test_no_body_whose_parts_multiply_holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    check([(path, orjson.dumps(body)) for path, body in attacks()], monkeypatch)
