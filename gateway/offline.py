"""Offline use of the engine: generate without a server, with the same scheduler and options.

    from gateway.offline import Podway

    with Podway("builtin") as model:
        for answer in model.generate(["Once upon a time", "The sea"], max_tokens=32):
            print(answer.text)

Prompts become the requests of the HTTP API, so every field of it can be used. All of them share
iterations. The event loop and the engine run in a thread of their own, the workers in processes;
so a script that uses this needs `if __name__ == "__main__":`.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

import orjson
import uvloop
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.errors import Unavailable
from gateway.access.callers import Caller
from gateway.pooling.group import body_of
from gateway.serve.embedded import embedded
from gateway.service import Service
from gateway.settings.server import IN_MEMORY
from gateway.settings.settings import Settings, load
from gateway.web.table import ROUTES

Message = Mapping[str, Any]
NO_LIMIT = str(1 << 60)
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LOADED_BATCHES = 4  # prompts beyond so many batches wait here, not in the scheduler's queue


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. `choice` is the API's choice object: log-probabilities, tool calls, reasoning."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int  # tokens of all the prompt's choices
    choice: Mapping[str, Any]

    @property
    def logprobs(self) -> Mapping[str, Any] | None:
        """The log-probabilities in the API's form; None if they were not requested."""
        found: Mapping[str, Any] | None = self.choice.get("logprobs")
        return found


class Podway:
    """A loaded model. Use it in a `with` block, or call `close`; several threads may share it.

    `settings` are those of `podway serve`, for instance `weights="int8"` or `policy="mlfq"`.
    PODWAY_ variables and podway.toml apply as well. Raises `StartupError`.
    """

    def __init__(
        self, model: str = "builtin", *, progress: bool = True, **settings: object
    ) -> None:
        defaults = {"max_queue_requests": NO_LIMIT, "max_queue_tokens": NO_LIMIT}
        defaults["prefill_slowdown"] = "0"  # no bound: throughput counts, not the ITL
        given = {name: value if value is True else str(value) for name, value in settings.items()}
        own = {"model": model, "store": IN_MEMORY, "drain_seconds": "0"}
        self._settings = load({**defaults, **given, **own})
        self._progress = progress
        self._started: Future[Service] = Future()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="podway", daemon=True)
        self._thread.start()
        try:
            self._service = self._started.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and its workers; requests that run are cancelled."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def generate(
        self, prompts: str | Sequence[str | Sequence[int]], **fields: Any
    ) -> list[Generation]:
        """Complete each prompt, a text or token ids; `fields` are those of `/v1/completions`.

        Returns the answers in order, `n` for each prompt. Raises `InvalidRequest` for a field that
        is wrong, and `EngineError` if a request fails; the other requests are then cancelled.
        """
        many = [prompts] if isinstance(prompts, str) else prompts
        return self._answers(_COMPLETIONS, [{"prompt": prompt, **fields} for prompt in many])

    def chat(
        self, conversations: Sequence[Message] | Sequence[Sequence[Message]], **fields: Any
    ) -> list[Generation]:
        """Answer each conversation; `fields` are those of `/v1/chat/completions`.

        A single conversation, a list of messages, is also accepted. Returns and raises as
        `generate` does.
        """
        is_single = bool(conversations) and isinstance(conversations[0], Mapping)
        many = [conversations] if is_single else conversations
        return self._answers(_CHAT, [{"messages": list(each), **fields} for each in many])

    def _answers(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Generation]:
        if not self._thread.is_alive():
            raise Unavailable("This Podway is closed.")
        columns = (TextColumn("prompts"), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        is_hidden = not (self._progress and console.is_terminal)
        with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
            task = bar.add_task("prompts", total=len(bodies))
            work = self._generate_all(path, bodies, lambda: bar.advance(task))
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
            try:
                return running.result()
            except BaseException:
                running.cancel()  # Ctrl-C: the requests end
                raise

    async def _generate_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], done: Callable[[], object]
    ) -> list[Generation]:
        slots = asyncio.Semaphore(_LOADED_BATCHES * self._settings.scheduler.max_batch_size)

        async def one(body: Mapping[str, Any]) -> list[Generation]:
            async with slots:
                answers = await self._generate(path, body)
            done()
            return answers

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(body)) for body in bodies]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [answer for task in tasks for answer in task.result()]

    async def _generate(self, path: str, fields: Mapping[str, Any]) -> list[Generation]:
        service = self._service
        caller = Caller(service.new_id("req_"), service.clock())
        body = orjson.dumps({"model": service.model.name, **fields})
        plan = await ROUTES.batch_endpoints[path](body, caller, service)
        return _read(orjson.loads(await body_of(plan, service)))

    def _run(self) -> None:
        """The thread: load the model, run the engine until `close`."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._loop = runner.get_loop()
            try:
                runner.run(self._serve(self._settings))
            except BaseException as error:
                if self._started.done():
                    raise
                self._started.set_exception(error)

    async def _serve(self, settings: Settings) -> None:
        async with embedded(settings) as server:
            self._started.set_result(server.service)
            await self._stop.wait()


def _read(body: Mapping[str, Any]) -> list[Generation]:
    """The choices of a completion or chat completion."""
    usage = body["usage"]
    return [
        Generation(
            text=choice["text"] if "text" in choice else choice["message"]["content"] or "",
            finish_reason=choice["finish_reason"],
            num_prompt_tokens=usage["prompt_tokens"],
            num_output_tokens=usage["completion_tokens"],
            choice=choice,
        )
        for choice in body["choices"]
    ]
