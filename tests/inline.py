"""A whole engine in this process, over a worker that computes: requests in, outcomes out."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import EngineError, WorkerLost
from engine.iteration import Observer
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.media import ImagePixels
from engine.policy.base import Policy
from engine.policy.fcfs import FirstComeFirstServed
from engine.ports import StepExecutor
from engine.replicas.replicas import ServingEngine
from engine.request import FinishReason, Request, RequestSpec
from engine.speculation.drafter import Drafter
from engine.step import HASH_BYTES, PageKind, Step, StepResult, TokenLogprobs
from engine.worker_settings import WorkerReport
from tests.inline_executor import InlineExecutor, ResultFuture


@dataclass
class RequestOutcome:
    """The tokens, log-probabilities and end of one stream."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    error: EngineError | None = None


class RunsSteps(Protocol):
    """A worker, or what stands for it."""

    @property
    def report(self) -> WorkerReport: ...

    def run(self, step: Step) -> StepResult: ...


Client = Callable[[Engine, RequestSpec], Awaitable[RequestOutcome]]


class Mortal:
    """An inline executor whose worker dies in the steps with these numbers, and comes back."""

    def __init__(self, worker: RunsSteps, dies_in: Sequence[int], depth: int) -> None:
        self.steps: list[Step] = []
        self._worker = worker
        self._dies_in = set(dies_in)
        self._depth = depth
        self._inner = InlineExecutor(self, depth)

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def is_alive(self) -> bool:
        return True

    def watch(self, on_lost: Callable[[], object]) -> None:
        """A lost worker is reported by the step that meets it."""

    def submit(self, step: Step) -> ResultFuture:
        return self._inner.submit(step)

    async def restart(self) -> None:
        self._inner = InlineExecutor(self, self._depth)

    def run(self, step: Step) -> StepResult:
        self.steps.append(step)
        if len(self.steps) in self._dies_in:
            raise WorkerLost("as scripted")
        return self._worker.run(step)

    async def send_pixels(self, piece: ImagePixels) -> None:
        """Only the engine of a worker with an encoder sends them."""
        self._worker.put_pixels(piece)  # type: ignore[attr-defined]


def play(
    worker: RunsSteps,
    specs: Sequence[RequestSpec],
    *,
    num_blocks: int = 0,
    num_states: int = 0,
    dies_in: Sequence[int] = (),
    lookahead: int = 0,
    drafter: Drafter | None = None,
    saves_on_host: bool = False,
    policy: Policy | None = None,
    client: Client | None = None,
    **bounds: object,
) -> list[RequestOutcome]:
    """Serve all requests at once, to their end or as a `client` reads them; fewer `num_blocks` or
    `num_states` than the worker has lead to preemptions. The worker's disk tier is used if it has
    one."""
    executor = Mortal(worker, dies_in, 1 + lookahead)
    engine = engine_over(
        worker.report,
        executor,
        num_blocks=num_blocks,
        num_states=num_states,
        lookahead=lookahead,
        drafter=drafter,
        saves_on_host=saves_on_host,
        policy=policy,
        send_pixels=executor.send_pixels if worker.report.encoder else None,
        **bounds,  # type: ignore[arg-type]
    )
    return asyncio.run(serve(engine, specs, client or read_all))


def engine_over(
    report: WorkerReport,
    executor: StepExecutor,
    *,
    num_blocks: int = 0,
    num_states: int = 0,
    lookahead: int = 0,
    drafter: Drafter | None = None,
    saves_on_host: bool = False,
    policy: Policy | None = None,
    observer: Observer | None = None,
    send_pixels: Callable[[ImagePixels], Awaitable[object]] | None = None,
    **bounds: object,
) -> Engine:
    """An engine whose executor's worker reported this; `num_blocks` and `num_states` as above."""
    settings = SchedulerSettings(max_model_len=report.max_model_len, **bounds)  # type: ignore[arg-type]
    ledger = KVLedger(
        KVShape(
            num_blocks or report.num_blocks,
            report.block_size,
            report.tiers.num_host_blocks,
            len(report.tiers.disk_hashes) // HASH_BYTES,
            saves_on_host=saves_on_host,
            windows=report.windows,
            chunk=settings.max_batch_tokens * (1 + lookahead),
            num_states=num_states or report.num_states,
            num_host_states=report.tiers.num_host_states,
            num_disk_states=len(report.tiers.disk_state_hashes) // HASH_BYTES,
        )
    )
    scheduler = IterationScheduler(
        settings,
        ledger,
        policy or FirstComeFirstServed(),
        observer,
        drafter=drafter,
        encoder=report.encoder,
    )
    hashes, state_hashes = report.tiers.disk_hashes, report.tiers.disk_state_hashes
    scheduler.kv.search.restore_disk({PageKind.BLOCK: hashes, PageKind.SNAPSHOT: state_hashes})
    return Engine(
        scheduler, executor, time.perf_counter, lookahead=lookahead, send_pixels=send_pixels
    )


async def serve(
    engine: Engine, specs: Sequence[RequestSpec], client: Client
) -> list[RequestOutcome]:
    """Serve all requests at once; afterwards no KV is held."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        outcomes = await asyncio.gather(*(client(engine, spec) for spec in specs))
        await engine.drain(60.0)  # of the last of a surplus
        running.cancel()
    engine.scheduler.ledger.check()
    assert engine.scheduler.ledger.num_held == 0
    return outcomes


async def read_all(
    engine: ServingEngine, spec: RequestSpec, most: int | None = None
) -> RequestOutcome:
    """Read a request's stream to its end, or until `most` tokens have come."""
    with engine.stream(spec) as stream:
        outcome = RequestOutcome(stream.request)
        while outcome.finish is None and (most is None or len(outcome.tokens) < most):
            try:
                chunk = await stream.next()
            except EngineError as error:
                outcome.error = error
                break
            outcome.tokens += chunk.tokens
            outcome.logprobs += chunk.logprobs
            outcome.prompt_logprobs += chunk.prompt_logprobs
            outcome.finish = chunk.finish
    return outcome
