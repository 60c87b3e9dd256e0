"""`podway serve` from settings to a running server: open the models, build the gateway over their
groups, and serve until a signal.

    settings ─▶ groups (`gateway.serve.opening`) ─▶ service ─▶ app ─▶ server
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import uvloop
from platformdirs import user_state_path

from engine.errors import StartupError
from engine.transport.process import LocalLauncher
from engine.turns import Turns
from gateway.access.callers import MAX_COMMAS, BodyLimits
from gateway.access.origins import OriginPolicy, is_loopback
from gateway.batch.lines import LineLimits
from gateway.batch.runner import BatchRunner
from gateway.generation.restored_streams import restore_streams
from gateway.groups.group import Deployment, Group
from gateway.groups.groups import Groups
from gateway.observe.backpressure import LoopWatch
from gateway.observe.exposition import Exposition
from gateway.observe.metrics import Metrics
from gateway.observe.readings import ServerReadings
from gateway.observe.request_log import RequestLog
from gateway.observe.traces import Traces
from gateway.serve.connection import ConnectionBounds, ParsingMeter
from gateway.serve.credentials import Credentials, load_credentials
from gateway.serve.load import OnProgress, lora_specs, served_name
from gateway.serve.load_times import LoadTime
from gateway.serve.memory import default_memory, parts_of
from gateway.serve.opening import ModelOpener, SharedObservers
from gateway.serve.places import MIN_PER_NETWORK
from gateway.serve.server import Server, Signals, bind, raise_file_limit, unless_stopped
from gateway.service import Pace, Service, unix_now
from gateway.settings.server import IN_MEMORY
from gateway.settings.settings import Settings
from gateway.store.event_ring import RingLimits
from gateway.store.store import Store, open_default, open_named, open_store
from gateway.store.usage import StoreLimits
from gateway.web.app import build_app
from gateway.web.table import ROUTES

OnReady = Callable[[int, "Models"], None]  # the port, and what is served on it

TOKENIZER_THREADS = 2
SWITCH_SECONDS = 0.001  # that the event loop may wait for a thread that runs Python code


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a server: how each is opened, and their groups."""

    openers: tuple[ModelOpener, ...]
    groups: Groups
    shared: SharedObservers


def serve(
    settings: Settings,
    launcher: LocalLauncher | None = None,
    *,
    progress: OnProgress,
    announce: OnReady,
) -> None:
    """Serve until a signal. Raises `StartupError`, and `KeyboardInterrupt` after Ctrl-C."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, launcher, progress, announce))


async def _serve(
    settings: Settings, launcher: LocalLauncher | None, progress: OnProgress, announce: OnReady
) -> None:
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize")
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    credentials = load_credentials(settings)
    with Signals() as signals, closing(bind(settings.http.host, settings.http.port)) as listener:
        if credentials.has_files:
            signals.on_hangup(credentials.reload)
        async with AsyncExitStack() as stack:
            store = build_store(settings, served_name(settings.deployments[0]))
            stack.callback(store.close)
            if launcher is not None and settings.models and not settings.models[0].terms.pinned:
                launcher.discard()
            models = build_models(settings, stack, launcher, progress)
            loading = asyncio.create_task(load_at_start(models.groups), name="load")
            if await unless_stopped(loading, signals):
                port = listener.getsockname()[1]
                service = build_service(settings, models, credentials, store)
                server = build_server(settings, service, credentials)
                await server.serve(listener, signals, lambda: announce(port, models))
        if signals.is_interrupt:
            raise KeyboardInterrupt


def build_store(settings: Settings, model: str) -> Store:
    """The store that `--store` names; by default one file per model."""
    limits = StoreLimits(
        file_bytes=settings.store.max_file_bytes,
        tenant_bytes=settings.store.max_key_bytes,
        total_bytes=settings.store.max_store_bytes,
    )
    replay = settings.replay
    rings = RingLimits(replay.max_key_replay_bytes, replay.max_replay_bytes, replay.replay_seconds)
    if settings.store.store == IN_MEMORY:
        return open_store(None, limits, rings=rings)
    if settings.store.store is not None:
        return open_named(Path(settings.store.store).expanduser(), limits, rings)
    folder = user_state_path("podway", appauthor=False)
    return open_default(folder / f"{quote(model, safe='')}.sqlite", limits, rings)


def build_models(
    settings: Settings,
    stack: AsyncExitStack,
    launcher: LocalLauncher | None = None,
    progress: OnProgress = lambda what, done, total: None,
) -> Models:
    """The groups of all models, none of which is loaded; `stack` closes them."""
    deployments, terms = settings.deployments, settings.server_terms
    estimates = [0]
    if len(deployments) > 1 or terms.memory:
        terms = replace(terms, memory=terms.memory or default_memory())
        parts = parts_of(deployments, terms.memory)
        deployments = tuple(part.settings for part in parts)
        estimates = [part.num_bytes for part in parts]
    clock, endpoint = time.perf_counter, settings.observe.otlp_endpoint
    server_metrics = Metrics()
    traces = None
    if endpoint is not None:
        traces = Traces(endpoint, served_name(deployments[0]), clock, server_metrics)
        stack.callback(traces.close)
    shared = SharedObservers(RequestLog(clock), server_metrics, traces=traces)
    turns = Turns(clock) if len(deployments) > 1 else None
    openers = tuple(
        ModelOpener(each, shared, turns, None if index else launcher, progress)
        for index, each in enumerate(deployments)
    )
    groups = Groups(
        [group_of(each, num_bytes) for each, num_bytes in zip(openers, estimates, strict=True)],
        terms,
    )
    check_names(groups)
    stack.push_async_callback(groups.close)
    return Models(openers, groups, shared)


def group_of(opener: ModelOpener, num_bytes: int) -> Group:
    """The group of a model, which is not loaded."""
    settings, clock = opener.settings, time.perf_counter
    deployment = deployment_of(settings, num_bytes)
    if not num_bytes and settings.terms.idle_unload is None:  # it is loaded once
        return Group(deployment, opener.open, clock)
    load_time = LoadTime(settings)
    return Group(deployment, opener.open, clock, load_time.seconds, load_time.save)


def check_names(groups: Groups) -> None:
    """Raise `StartupError` if two models have the same name."""
    counts = Counter(name for group in groups for name in group.names)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise StartupError(f"{count} models have the name {name!r}")


async def load_at_start(groups: Groups) -> bool:
    """Load the pinned models, or the only one. Raises `StartupError`."""
    for group in groups:
        if group.terms.pinned or len(groups) == 1:
            await groups.loads.load(group)
    return True


def deployment_of(settings: Settings, num_bytes: int) -> Deployment:
    """What is known of a model before it is loaded."""
    name, *aliases = settings.model.served_model_name or (served_name(settings),)
    loras = tuple(spec.name for spec in lora_specs(settings))
    return Deployment(name, tuple(aliases), loras, settings.terms, num_bytes, unix_now())


def build_service(
    settings: Settings, models: Models, credentials: Credentials, store: Store
) -> Service:
    """What routes use, over the groups."""
    groups, shared = models.groups, models.shared
    clock = time.perf_counter
    longest = max([max_model_len(group) for group in groups])
    server_readings = ServerReadings(shared.metrics, store.database, shared.request_log)
    return Service(
        groups=groups,
        group=groups.default,
        exposition=Exposition(server_readings, groups.readings, clock, has_several=len(groups) > 1),
        watch=LoopWatch(clock, shared.metrics.loop_lag),
        clock=clock,
        unix_now=unix_now,
        random=random.SystemRandom(),
        keys=credentials.keys,
        limits=BodyLimits(
            settings.http.max_body_bytes,
            settings.http.body_seconds,
            max(MAX_COMMAS, 2 * longest),
        ),
        pace=Pace(stall=settings.http.stall_seconds, whole=settings.http.keepalive_whole),
        quotas=shared.quotas,
        origins=OriginPolicy(
            is_loopback(settings.http.host), settings.http.allowed_host, settings.http.cors_origin
        ),
        rejects_unknown_fields=settings.http.unknown_fields == "reject",
        is_strict_about_max_tokens=settings.http.strict_max_tokens,
        store=store,
        request_log=shared.request_log,
        traces=shared.traces,
        has_page=settings.http.page,
    )


def max_model_len(group: Group) -> int:
    """The context length of a model, if it is loaded or was set."""
    if (serving := group.loaded) is None:
        return 0
    return serving.engine.scheduler.settings.max_model_len


def build_server(settings: Settings, service: Service, credentials: Credentials) -> Server:
    """The HTTP server over a service."""
    max_connections = settings.http.max_connections or raise_file_limit()
    share = max(MIN_PER_NETWORK, max_connections // 4)
    bounds = ConnectionBounds(
        max_connections,
        settings.http.body_seconds,
        settings.http.stall_seconds,
        ParsingMeter(),
        settings.http.max_address_connections or share,
        frozenset(route.path.encode() for route in ROUTES.routes if route.is_probe),
    )
    limits = LineLimits(line_bytes=settings.http.max_body_bytes)
    batch_size = settings.scheduler.max_batch_size
    runner = BatchRunner(service, ROUTES.batch_endpoints, batch_size, limits)
    app = build_app(service)
    return Server(
        app=app,
        groups=service.groups,
        watch=service.watch,
        runner=runner,
        drain_seconds=settings.http.drain_seconds,
        request_log=service.request_log,
        held=service.store.held,
        bounds=bounds,
        restore=partial(restore_streams, service, ROUTES.planners),
        tls=credentials.tls,
    )
