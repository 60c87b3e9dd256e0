"""A small scripted OpenAI-compatible server in a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web


@dataclass(eq=False)
class Peer:
    """Answers with `words`. With `hold`, or from the request number `hold_from` on, it keeps the
    stream open after them until the client disconnects; `held` is then released once."""

    words: list[str] = field(default_factory=lambda: ["Hel", "lo", "!"])
    deltas: list[dict[str, Any]] = field(default_factory=list)  # of chat, instead of words
    hold: bool = False
    hold_from: int | None = None
    held: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    break_off: bool = False
    reject: tuple[int, str] | None = None
    error_event: str | None = None
    usage: bool = True
    usage_tokens: int | None = None  # instead of two for each word
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    async def models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "peer", "object": "model"}]})

    async def other(self, http: web.Request) -> web.Response:
        return web.json_response({"hello": "world"})

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, lambda word: {"delta": {"content": word}})

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, lambda word: {"text": word})

    async def _answer(self, http: web.Request, choice: Any) -> web.StreamResponse:
        self.bodies.append(orjson.loads(await http.read()))
        self.headers.append(dict(http.headers))
        is_held = self.hold_from is not None and len(self.bodies) >= self.hold_from
        if self.reject is not None:
            status, message = self.reject
            return web.json_response({"error": {"message": message}}, status=status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        deltas = [{"delta": delta} for delta in self.deltas] or map(choice, self.words)
        for delta in deltas:
            await _event(response, {"choices": [delta | {"finish_reason": None}]})
        try:
            if self.hold or is_held:
                self.held.release()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        if self.error_event is not None:
            await _event(response, {"error": {"message": self.error_event}})
        elif not self.break_off:
            await self._finish(response, choice)
        return response

    async def _finish(self, response: web.StreamResponse, choice: Any) -> None:
        await _event(response, {"choices": [choice("") | {"finish_reason": "stop"}]})
        if self.usage:
            produced = 2 * len(self.words) if self.usage_tokens is None else self.usage_tokens
            usage = {"prompt_tokens": 7, "completion_tokens": produced}
            await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")


async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b": ping\r\n\r\ndata: " + orjson.dumps(event) + b"\r\n\r\n")


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A running `Peer`; set its fields before the request that they are for."""
    peer = Peer()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(_start(peer), loop).result()
    yield peer
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _start(peer: Peer) -> web.AppRunner:
    app = web.Application()
    app.router.add_get("/v1/models", peer.models)
    app.router.add_get("/other/{path:.*}", peer.other)  # as of a server of something else
    app.router.add_post("/v1/chat/completions", peer.chat)
    app.router.add_post("/v1/completions", peer.completions)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    peer.url = f"http://{host}:{port}"
    return runner


@pytest.fixture
def quick_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made, but not drawn, which takes matplotlib a second: `test_report` draws one."""

    def write(_: object, path: Path, **__: object) -> None:
        path.write_bytes(b"\x89PNG")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", write)
