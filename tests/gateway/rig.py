"""The real app over the real engine in virtual time, with a scripted model.

The model is that of `tests.gateway.scripted_model`; an iteration takes `STEP` seconds. Request `i`
(counted from 0) generates the `i`-th of the given texts, then the end token.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Concatenate

from starlette.types import ASGIApp

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import UNMEASURED, CostModel
from engine.iteration import Observer, ObserverGroup
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.media import EncoderReport, ImagePixels
from engine.policy import PolicySettings, build
from engine.pooling import PoolingReport
from engine.request import Request
from engine.simulated.virtual_loop import run_virtual
from engine.speculation.drafter import Drafter
from engine.speculation.settings import SpeculationSettings
from gateway.access.bodies import BodyLimits
from gateway.access.callers import Quotas
from gateway.access.grammar_check import GrammarCheck
from gateway.access.key_file import Allowance, KeyDefaults
from gateway.access.keys import Keys
from gateway.access.origins import OriginPolicy
from gateway.batch.lines import LineLimits
from gateway.batch.runner import BatchRunner
from gateway.generation.restored_streams import restore_streams
from gateway.groups.group import Group, ServedModel, Serving
from gateway.groups.groups import Groups
from gateway.images.reader import Fetcher, ImageLimits, ImageReader
from gateway.loras import LoraRegistry
from gateway.observe.backpressure import LoopWatch, ThreadTimes
from gateway.observe.exposition import Exposition
from gateway.observe.live import LiveView
from gateway.observe.metrics import LoraUsage, Metrics, StepMetrics
from gateway.observe.readings import Readings, ServerReadings
from gateway.observe.request_log import RequestLog
from gateway.observe.timelines import Timelines
from gateway.ports import Dialect, ImageDecoder, Tokenizer
from gateway.schema.fields.sampling import SamplingDefaults, Vocabulary
from gateway.service import Pace, Service
from gateway.store.database import StoreExecutor
from gateway.store.event_ring import RingLimits
from gateway.store.responses import ResponseLimits
from gateway.store.store import open_store
from gateway.store.usage import StoreLimits
from gateway.web.app import build_app
from gateway.web.table import ROUTES
from tests.gateway.lora_loader import ScriptedLoader
from tests.gateway.scenes import P, plays
from tests.gateway.scripted_model import (
    END,
    ByteTokenizer,
    CheckedOnLoop,
    Inline,
    PlainTemplate,
    ScoringExecutor,
    ScriptedTexts,
    image_template,
)
from tests.wire.asgi import Client

STEP = 0.25
EPOCH = 1_700_000_001
MODEL = "org/tiny-bytes"
CONTEXT = 200
USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a test may configure."""

    texts: Sequence[str] = ("Hello!",)
    step: float = STEP
    context: int = CONTEXT
    num_blocks: int = 1000
    num_host_blocks: int = 0
    admission: Admission = Admission.GROW
    policy: str = "fcfs"
    prefix_cache: bool = True
    max_queue_requests: int = 100
    max_queue_tokens: int = 1 << 20
    max_batch_size: int = 8
    max_batch_tokens: int = 2048
    itl_goal: float = inf
    keys: Sequence[str] = ()
    key_file: Path | None = None
    allowance: Allowance = field(default_factory=Allowance)
    cors_origins: Sequence[str] = ()
    admin_keys: Sequence[str] = ()
    isolates_prefixes: bool = True
    listens_on_loopback: bool = True
    allowed_hosts: Sequence[str] = ()
    rejects_unknown_fields: bool = False
    is_strict_about_max_tokens: bool = False
    max_body_bytes: int = 1 << 20
    pace: Pace = field(default_factory=Pace)
    dialect: Dialect | None = None
    trusts_request_templates: bool = True
    aliases: tuple[str, ...] = ()
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # noqa: RUF009 # frozen
    seed: int = 1
    speculation: SpeculationSettings | None = None
    store: Path | None = None
    store_executor: Callable[[], StoreExecutor] = Inline
    files: StoreLimits = field(default_factory=StoreLimits)
    responses: ResponseLimits = field(default_factory=ResponseLimits)
    lines: LineLimits = field(default_factory=LineLimits)
    pooling: PoolingReport | None = None
    max_loras: int = 2
    rings: RingLimits = field(default_factory=RingLimits)
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    decoder: ImageDecoder | None = None
    image_limits: ImageLimits = ImageLimits()  # noqa: RUF009 # frozen
    fetcher: Fetcher | None = None


@dataclass(frozen=True, slots=True)
class Rig:
    """What a scene uses; `ended` holds the requests that have ended, in order."""

    app: ASGIApp
    client: Client
    service: Service
    metrics: Metrics
    ended: list[Request]
    runner: BatchRunner
    loader: ScriptedLoader
    executor: ScoringExecutor

    @property
    def engine(self) -> Engine:
        engine = self.service.engine
        assert isinstance(engine, Engine), "a model without replicas"
        return engine


class Ends(Observer):
    """Collects the requests that have ended."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def ended(self, request: Request, now: float) -> None:
        self.requests.append(request)


def play(
    scene: Callable[[Rig], Awaitable[None]],
    setting: Setting | None = None,
    run: Callable[[Coroutine[Any, Any, Rig]], Rig] = run_virtual,
) -> Rig:
    """Run a scene to its end; afterwards no request lives and every slot is free.

    `run=asyncio.run` runs it in real time, for scenes with threads.
    """

    async def main() -> Rig:
        rig = build_rig(setting or Setting())
        async with asyncio.TaskGroup() as group:
            running = group.create_task(rig.service.groups.run())
            batching = group.create_task(rig.runner.run())
            await restore_streams(rig.service, ROUTES.planners)
            await scene(rig)
            batching.cancel()
            await rig.service.store.held.close()
            await asyncio.sleep(2 * STEP)
            running.cancel()
        rig.service.store.close()
        scheduler = rig.engine.scheduler
        assert not scheduler.pool, scheduler
        assert scheduler.ledger.num_held == 0, scheduler
        return rig

    return run(main())


def played(
    setting: Setting | None = None,
    run: Callable[[Coroutine[Any, Any, Rig]], Rig] = run_virtual,
) -> Callable[[Callable[Concatenate[Rig, P], Awaitable[None]]], Callable[P, None]]:
    """Make a coroutine function, whose first parameter is a rig, a test that `play`s it."""
    return plays(lambda scene: play(scene, setting, run))


def build_rig(setting: Setting) -> Rig:
    """The parts, assembled as the server does it."""
    clock = asyncio.get_running_loop().time
    metrics, ends, quotas = Metrics(), Ends(), Quotas()
    view, timelines, request_log = LiveView(), Timelines(), RequestLog(clock)
    lora_usage, loader = LoraUsage(setting.max_loras), ScriptedLoader()
    born_at = clock()
    cost = CostModel.linear(per_step=setting.step, per_token=0.0, per_slot=0.0)
    live = LiveCost(UNMEASURED)
    scheduler = IterationScheduler(
        SchedulerSettings(
            max_model_len=setting.context,
            max_batch_size=setting.max_batch_size,
            max_batch_tokens=setting.max_batch_tokens,
            itl_goal=setting.itl_goal,
            max_queue_requests=setting.max_queue_requests,
            max_queue_tokens=setting.max_queue_tokens,
            admission=setting.admission,
            reuses_prefixes=setting.prefix_cache,
        ),
        KVLedger(KVShape(setting.num_blocks, 1, setting.num_host_blocks)),
        build(setting.policy, live, PolicySettings(seats=setting.max_batch_size)),
        ObserverGroup(
            metrics,
            StepMetrics(metrics),
            metrics.requests,
            request_log,
            ends,
            quotas,
            view,
            timelines,
            lora_usage,
        ),
        live,
        Drafter.build(setting.speculation, LiveCost(cost)) if setting.speculation else None,
        None if setting.decoder is None else EncoderReport(1, 4, 1, 1, 1),
    )
    timelines.attach(scheduler)
    store = open_store(
        setting.store,
        setting.files,
        setting.store_executor(),
        setting.responses,
        clock,
        setting.rings,
    )
    executor = ScoringExecutor(cost, next_token=ScriptedTexts(setting.texts))
    reads_images = setting.decoder is not None
    send_pixels = _send_pixels if reads_images else None
    engine = Engine(scheduler, executor, clock, send_pixels=send_pixels)
    images = None
    if setting.decoder is not None:
        images = ImageReader(setting.decoder, setting.image_limits, setting.fetcher)
    serving = Serving(
        engine=engine,
        model=ServedModel(
            name=MODEL,
            created=1_700_000_000,
            fingerprint="fp_test",
            vocabulary=Vocabulary(END + 1, frozenset({END})),
            tokenizer=setting.tokenizer,
            template=PlainTemplate() if setting.decoder is None else image_template(),
            dialect=setting.dialect,
            trusts_request_templates=setting.trusts_request_templates,
            aliases=setting.aliases,
            sampling_defaults=setting.sampling_defaults,
            pooling=setting.pooling,
            images=images,
        ),
        grammars=GrammarCheck(CheckedOnLoop()),
        readings=Readings(metrics, scheduler, lora_usage),
        live=view,
        timelines=timelines,
        loras=LoraRegistry(loader, lora_usage, (MODEL, *setting.aliases), engine.fail_lora),
    )
    groups = Groups([Group.of(serving, clock)])
    service = Service(
        groups=groups,
        group=groups.default,
        exposition=Exposition(
            ServerReadings(metrics, store.database, request_log), groups.readings, clock
        ),
        watch=LoopWatch(clock, metrics.loop_lag, times=lambda: ThreadTimes(0.0, 0.0)),
        clock=clock,
        cpu_clock=clock,
        unix_now=lambda: EPOCH + int(clock() - born_at),
        random=random.Random(setting.seed),
        keys=Keys(
            setting.keys,
            setting.key_file,
            KeyDefaults(setting.allowance, setting.isolates_prefixes),
            setting.admin_keys,
        ),
        quotas=quotas,
        origins=OriginPolicy(
            setting.listens_on_loopback, setting.allowed_hosts, setting.cors_origins
        ),
        rejects_unknown_fields=setting.rejects_unknown_fields,
        is_strict_about_max_tokens=setting.is_strict_about_max_tokens,
        limits=BodyLimits(setting.max_body_bytes, seconds=10.0),
        pace=setting.pace,
        store=store,
        request_log=request_log,
    )
    runner = BatchRunner(service, ROUTES.batch_endpoints, setting.max_batch_size, setting.lines)
    app = build_app(service)
    return Rig(app, Client(app), service, metrics, ends.requests, runner, loader, executor)


async def _send_pixels(piece: ImagePixels) -> None:
    """The executor computes no images."""


def chat(**fields: Any) -> dict[str, Any]:
    """A chat request's body."""
    return {"model": MODEL, "messages": USER, **fields}


def key(name: str) -> dict[str, str]:
    """The header of a client with this API key."""
    return {"authorization": f"Bearer {name}"}


def text(**fields: Any) -> dict[str, Any]:
    """A text completion request's body."""
    return {"model": MODEL, "prompt": "ab", **fields}
