"""`podway serve` from settings to a running server: open the models, build the gateway over their
groups, and serve until a signal.

    settings ─▶ groups (`gateway.serve.opening`) ─▶ service ─▶ app ─▶ server
"""

import asyncio
import importlib
import os
import random
import socket
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
from engine.transport.process_memory import available_bytes
from engine.turns import Turns
from gateway.access.bodies import MAX_COMMAS, MAX_ESCAPES, MAX_OBJECTS, BodyLimits
from gateway.access.origins import OriginPolicy, is_loopback
from gateway.batch.lines import LineLimits
from gateway.batch.runner import BatchRunner
from gateway.generation.restored_streams import restore_streams
from gateway.groups.group import UNMEASURED_LOAD_SECONDS, Deployment, Group
from gateway.groups.groups import Groups
from gateway.observe.backpressure import LoopWatch
from gateway.observe.exposition import Exposition
from gateway.observe.metrics import Metrics
from gateway.observe.readings import ServerReadings
from gateway.observe.request_log import RequestLog
from gateway.observe.traces import Traces
from gateway.serve.arrival import ParsingMeter, SharedRate
from gateway.serve.connection import ConnectionBounds, Retirement
from gateway.serve.cores import count_replicas
from gateway.serve.linger import BYTES_PER_SECOND
from gateway.serve.load import OnProgress, lora_specs, served_name
from gateway.serve.memory import default_memory, parts_of, weight_bytes
from gateway.serve.opening import ModelOpener, SharedObservers
from gateway.serve.places import MIN_PER_NETWORK
from gateway.serve.process import raise_file_limit
from gateway.serve.saved import load_time_file
from gateway.serve.server import Server, Signals, bind, is_called, unless_stopped
from gateway.serve.tls import Credentials, load_credentials
from gateway.serve.upgrade.channel import Predecessor
from gateway.serve.upgrade.inherited import Inherited
from gateway.serve.upgrade.successor import Upgrades
from gateway.serve.upgrade.waiter import block_signals, remember_signals
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
PROCESS_BYTES = 512 << 20  # a server and its worker, besides weights and KV
SWITCH_SECONDS = 0.001  # the event loop may wait so long for a thread that runs Python code


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
    inherited: Inherited | None = None,
) -> bool:
    """Serve until a signal, or until a successor has taken over and all requests have ended; the
    result is whether there is one. Raises `StartupError`, and `KeyboardInterrupt` after Ctrl-C."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, launcher, progress, announce, inherited))


async def _serve(
    settings: Settings,
    launcher: LocalLauncher | None,
    progress: OnProgress,
    announce: OnReady,
    inherited: Inherited | None,
) -> bool:
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize")
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    credentials = load_credentials(settings)
    predecessor = None
    if inherited is not None:
        settings = beside_former(settings)
        files = (settings.observe.record, settings.launch.trace)
        predecessor = await Predecessor.join(inherited, filter(None, files))
    listening = socket_of(settings, inherited)
    with Signals() as signals, closing(listening) as listener:
        if credentials.has_files:
            signals.on_hangup(credentials.reload)
        async with AsyncExitStack() as stack:
            shared = None if predecessor is None else predecessor.store
            store = build_store(settings, served_name(settings.deployments[0]), shared)
            stack.callback(store.close)
            if predecessor is not None:
                store.journal.begin_beside()
            if launcher is not None and settings.models and not settings.models[0].terms.pinned:
                launcher.discard()
            models = build_models(settings, stack, launcher, progress)
            has_successor = False
            if await unless_stopped(load_at_start(models, predecessor or listener), signals):
                port = listener.getsockname()[1]
                service = build_service(settings, models, credentials, store)
                check = partial(allow_second, models)
                upgrades = Upgrades(
                    store,
                    settings.http.upgrade_seconds,
                    check,
                    predecessor,
                    lambda: [each.model.name for each in models.groups.loaded],
                )
                server = build_server(settings, service, credentials)
                if predecessor is not None:
                    forwarding = importlib.import_module("gateway.serve.upgrade.forwarding")
                    app = forwarding.Forwarding(server.app, service, predecessor)
                    server = replace(server, app=app)
                server = replace(server, upgrades=upgrades, predecessor=predecessor)
                await server.serve(listener, signals, lambda: announce(port, models))
                if has_successor := upgrades.handed_over.is_set():
                    block_signals()
    if has_successor:
        remember_signals()
    if signals.is_interrupt:
        raise KeyboardInterrupt
    return has_successor


def socket_of(settings: Settings, inherited: Inherited | None) -> socket.socket:
    """The socket to listen on: the former server's, if its address is the same."""
    host, port = settings.http.host, settings.http.port
    if inherited is not None:
        listener = inherited.listener
        address, own = listener.getsockname()[:2]
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        if port in (0, own) and address == infos[0][4][0]:
            return listener
    return bind(host, port)


def beside_former(settings: Settings) -> Settings:
    """The settings of a server that succeeds another one, whose files may still be open. Recordings
    and traces get the process id in their names. Raises `StartupError` for what two servers cannot
    use at the same time."""
    observe, launch = settings.observe, settings.launch
    if observe.kv_events_config.is_published:  # its subscribers know one cache
        raise StartupError(
            "a server with --kv-events-config cannot be upgraded while it runs: restart it"
        )
    return replace(
        settings,
        tiers=replace(settings.tiers, disk_kv_shared=True),
        observe=replace(observe, record=_own(observe.record)),
        launch=replace(launch, trace=_own(launch.trace)),
        models=tuple(beside_former(each) for each in settings.models),
    )


def _own(path: Path | None) -> Path | None:
    """A file of this process beside the one that is named."""
    return None if path is None else path.with_stem(f"{path.stem}.{os.getpid()}")


def allow_second(models: "Models") -> None:
    """Let a second server run beside this one, which shares its disk tiers from now on. Raises
    `StartupError` unless the weights of the loaded models fit a second time. Their KV caches are
    sized by what is available then."""
    needed = PROCESS_BYTES
    for opener, group in zip(models.openers, models.groups, strict=True):
        if group.is_in_memory and not opener.settings.kernels.device.startswith("cuda"):
            needed += weight_bytes(opener.settings) * count_replicas(opener.settings)
    available = available_bytes()
    if needed > available:
        raise StartupError(
            f"a second server needs {needed >> 20:,} MiB beside this one, and {available >> 20:,} "
            "MiB are available"
        )
    for opener in models.openers:
        opener.share_disk()


def build_store(settings: Settings, model: str, shared: Path | None = None) -> Store:
    """The store that `--store` names; by default one file per model. The former server shares the
    file `shared`."""
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
        path = Path(settings.store.store).expanduser()
        return open_named(path, limits, rings, is_shared=path == shared)
    folder = user_state_path("podway", appauthor=False)
    path = folder / f"{quote(model, safe='')}.sqlite"
    if path == shared:
        return open_named(path, limits, rings, is_shared=True)
    return open_default(path, limits, rings)


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
    file = load_time_file(settings)
    seconds = file.load(float)
    if seconds is None:
        seconds = UNMEASURED_LOAD_SECONDS
    return Group(deployment, opener.open, clock, seconds, file.save)


def check_names(groups: Groups) -> None:
    """Raise `StartupError` if two models have the same name."""
    counts = Counter(name for group in groups for name in group.names)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise StartupError(f"{count} models have the name {name!r}")


async def load_at_start(models: Models, source: Predecessor | socket.socket | None = None) -> bool:
    """Load the pinned models, or the only one; raises `StartupError`. Then load what the former
    server had loaded, as far as there is room. `source` is where the first requests come from."""
    groups = models.groups
    if isinstance(source, socket.socket):
        for opener in models.openers:
            opener.is_awaited = partial(is_called, source)
    for group in groups:
        if group.terms.pinned or len(groups) == 1:
            await groups.loads.load(group)
    also = source.models if isinstance(source, Predecessor) else ()
    for group in groups:
        if group.name in also and groups.loads.has_room(group):
            await groups.loads.begin(group)
    for opener, group in zip(models.openers, groups, strict=True):
        opener.is_awaited = group.leases.are_awaited
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
            max(MAX_OBJECTS, longest // 16),
            max(MAX_ESCAPES, 8 * longest),
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
        Retirement(),
        SharedRate(BYTES_PER_SECOND),
    )
    limits = LineLimits(line_bytes=settings.http.max_body_bytes)
    batch_size = settings.scheduler.max_batch_size
    runner = BatchRunner(service, ROUTES.batch_endpoints, batch_size, limits)
    app = build_app(service)
    return Server(
        app=app,
        service=service,
        runner=runner,
        drain_seconds=settings.http.drain_seconds,
        bounds=bounds,
        restore=partial(restore_streams, service, ROUTES.planners),
        tls=credentials.tls,
    )
