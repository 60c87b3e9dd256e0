"""`podway serve` from settings to a running server: load the model, build scheduler and engine
over its workers, the gateway over the engine, and serve until a signal.

    LoadedModel ─▶ scheduler (with its observers) ─▶ engine ─▶ service ─▶ app ─▶ server
"""

import asyncio
import hashlib
import logging
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import uvloop
from platformdirs import user_state_path

from engine.control.event_recorder import RecordingHeader
from engine.control.scheduler import IterationScheduler
from engine.cost.live import LiveCost
from engine.events import Observer, ObserverGroup
from engine.kv_shape import KVShape
from engine.kv_store import MAX_NAMES
from engine.loop import Engine
from engine.speculation.drafter import Drafter
from engine.step import HASH_BYTES, PageKind
from engine.transport.process import LocalLauncher
from engine.worker_settings import WorkerReport
from gateway.access.callers import MAX_COMMAS, BodyLimits
from gateway.access.grammar_check import GrammarCheck
from gateway.access.origins import OriginPolicy, is_loopback
from gateway.access.quotas import Quotas
from gateway.batch.lines import LineLimits
from gateway.batch.runner import BatchRunner
from gateway.generation.paced_tokenizer import PacedTokenizer
from gateway.loras import LoraRegistry
from gateway.observe.backpressure import LoopWatch
from gateway.observe.exposition import Exposition
from gateway.observe.kv_events import KVEvents, ZmqPublisher, topic_of
from gateway.observe.live import LiveView
from gateway.observe.loras import LoraUsage
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings
from gateway.observe.recording import recording
from gateway.observe.request_log import RequestLog
from gateway.observe.timelines import Timelines
from gateway.observe.traces import Traces
from gateway.schema.fields.sampling import Vocabulary
from gateway.serve.connection import ConnectionBounds, ParsingMeter
from gateway.serve.credentials import Credentials, load_credentials
from gateway.serve.kv_lookup import KVLookup
from gateway.serve.load import LoadedModel, OnProgress, load_model, lora_specs, served_name
from gateway.serve.places import MIN_PER_NETWORK
from gateway.serve.server import Server, Signals, bind, raise_file_limit, unless_stopped
from gateway.service import Pace, ServedModel, Service, unix_now
from gateway.settings.server import IN_MEMORY
from gateway.settings.settings import Settings
from gateway.store.event_ring import RingLimits
from gateway.store.store import Store, open_default, open_named, open_store
from gateway.store.usage import StoreLimits
from gateway.version import podway_version
from gateway.web.app import build_app
from gateway.web.table import ROUTES

OnReady = Callable[[int, LoadedModel], None]  # the port, and what is served on it

TOKENIZER_THREADS = 2
SWITCH_SECONDS = 0.001  # that the event loop may wait for a thread that runs Python code

logger = logging.getLogger(__name__)


class ControlPlane(NamedTuple):
    """The scheduler, and the observers that the gateway reads."""

    scheduler: IterationScheduler
    metrics: Metrics
    quotas: Quotas
    live: LiveView
    timelines: Timelines
    request_log: RequestLog
    traces: Traces | None
    lora_usage: LoraUsage


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
            store = build_store(settings, served_name(settings))
            stack.callback(store.close)
            loading = asyncio.create_task(
                stack.enter_async_context(load_model(settings, progress, launcher)), name="load"
            )
            loaded = await unless_stopped(loading, signals)
            if loaded is not None:
                port = listener.getsockname()[1]
                cost = LiveCost(loaded.calibration.model)
                plane = build_control_plane(settings, loaded, cost, stack)
                lookup = _kv_lookup(settings, loaded, plane.metrics, stack)
                service = build_service(settings, loaded, plane, credentials, store, lookup)
                server = build_server(settings, service, credentials)
                await server.serve(listener, signals, lambda: announce(port, loaded))
                if (errors := cost.errors.summary()) is not None:
                    logger.info("error of predicted iteration times: %s", errors)
                if loaded.calibration.file is not None:
                    loaded.calibration.file.update(cost)
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


def build_service(
    settings: Settings,
    loaded: LoadedModel,
    plane: ControlPlane,
    credentials: Credentials,
    store: Store,
    lookup: KVLookup | None = None,
) -> Service:
    """The engine over a loaded model and its scheduler, and what routes use besides."""
    scheduler, metrics = plane.scheduler, plane.metrics
    readings = Readings(metrics, scheduler, store.database, plane.request_log, plane.lora_usage)
    ahead = loaded.lookahead
    depth = settings.workers.num_stages + ahead
    read_ahead = None
    if settings.tiers.disk_kv and settings.tiers.disk_kv_read_ahead:
        read_ahead = loaded.executor.read_ahead
    engine = Engine(
        scheduler,
        loaded.executor,
        time.perf_counter,
        lookahead=ahead,
        depth=depth,
        read_ahead=read_ahead,
        lookup=lookup,
        send_pixels=None if loaded.report.encoder is None else loaded.executor.send_pixels,
    )
    model = _served_model(settings, loaded, engine)
    loras = LoraRegistry(loaded.executor, plane.lora_usage, model.names, engine.fail_lora)
    loras.start(lora_specs(settings), loaded.report.loras, unix_now())
    return Service(
        engine=engine,
        model=model,
        loras=loras,
        grammars=GrammarCheck(loaded.texts.grammars),
        readings=readings,
        exposition=Exposition(readings, loaded.name, time.perf_counter),
        watch=LoopWatch(time.perf_counter, metrics.loop_lag),
        clock=time.perf_counter,
        unix_now=unix_now,
        random=random.SystemRandom(),
        keys=credentials.keys,
        limits=BodyLimits(
            settings.http.max_body_bytes,
            settings.http.body_seconds,
            max(MAX_COMMAS, 2 * loaded.report.max_model_len),
        ),
        pace=Pace(stall=settings.http.stall_seconds, whole=settings.http.keepalive_whole),
        quotas=plane.quotas,
        origins=OriginPolicy(
            is_loopback(settings.http.host), settings.http.allowed_host, settings.http.cors_origin
        ),
        rejects_unknown_fields=settings.http.unknown_fields == "reject",
        is_strict_about_max_tokens=settings.http.strict_max_tokens,
        policies=replace(settings.policies, seats=settings.scheduler.max_batch_size),
        store=store,
        request_log=plane.request_log,
        live=plane.live,
        timelines=plane.timelines,
        traces=plane.traces,
        has_page=settings.http.page,
    )


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
        engine=service.engine,
        watch=service.watch,
        runner=runner,
        drain_seconds=settings.http.drain_seconds,
        request_log=service.request_log,
        held=service.store.held,
        bounds=bounds,
        tls=credentials.tls,
    )


def build_control_plane(
    settings: Settings, loaded: LoadedModel, cost: LiveCost, stack: AsyncExitStack
) -> ControlPlane:
    """The scheduler and its observers. `stack` closes the recording, if there is one."""
    header = _recording_header(settings, loaded)
    metrics, quotas, live = Metrics(), Quotas(), LiveView()
    request_log = RequestLog(time.perf_counter)
    traces = None
    if settings.observe.otlp_endpoint is not None:
        traces = Traces(settings.observe.otlp_endpoint, loaded.name, time.perf_counter, metrics)
        stack.callback(traces.close)
    timelines = Timelines()
    if traces is not None:
        timelines.report_to(traces)
    lora_usage = LoraUsage(settings.loras.max_loras)
    observers: list[Observer] = [
        metrics,
        metrics.requests,
        request_log,
        quotas,
        live,
        timelines,
        lora_usage,
    ]
    if settings.observe.record is not None:
        observers.append(stack.enter_context(recording(settings.observe.record, header)))
    kv_events = _kv_events(settings, loaded, metrics, stack)
    if kv_events is not None:
        observers.append(kv_events)
    speculation = settings.model.speculative_config
    drafter = None
    if speculation is not None:
        report = loaded.report
        size_ratio = report.num_draft_parameters / max(1, report.num_parameters)
        drafter = Drafter.build(speculation, cost, size_ratio, time.perf_counter)
    scheduler = header.build(cost, ObserverGroup(*observers), drafter, loaded.report.encoder)
    search = scheduler.kv.search
    if kv_events is not None:
        search.listen(kv_events)
    hashes, state_hashes = loaded.report.disk_hashes, loaded.report.disk_state_hashes
    search.restore_disk({PageKind.BLOCK: hashes, PageKind.SNAPSHOT: state_hashes})
    timelines.attach(scheduler)
    return ControlPlane(
        scheduler, metrics, quotas, live, timelines, request_log, traces, lora_usage
    )


def _kv_lookup(
    settings: Settings, loaded: LoadedModel, metrics: Metrics, stack: AsyncExitStack
) -> KVLookup | None:
    """A client of the shared store, which the workers read and write."""
    keys = loaded.report.kv_store_keys
    if not keys:
        return None
    lookup = KVLookup.open(settings.tiers.kv_store, keys, metrics)
    stack.callback(lookup.close)
    return lookup


def _kv_events(
    settings: Settings, loaded: LoadedModel, metrics: Metrics, stack: AsyncExitStack
) -> KVEvents | None:
    config = settings.observe.kv_events_config
    if not config.is_published:
        return None
    publisher = ZmqPublisher(config, topic_of(config, loaded.name), metrics)
    stack.callback(publisher.close)
    return KVEvents(loaded.report.block_size, publisher.publish, loaded.report.windows)


def _recording_header(settings: Settings, loaded: LoadedModel) -> RecordingHeader:
    """Everything that schedules depend on; a recording begins with it."""
    report = loaded.report
    is_whole = report.pooling is not None and report.pooling.is_whole
    bounds = settings.scheduler
    scheduler = replace(
        bounds,
        max_model_len=report.max_model_len,
        max_batch_tokens=max(bounds.max_batch_tokens, report.max_model_len if is_whole else 0),
        chunks_prompts=not is_whole,
        reuses_prefixes=bounds.reuses_prefixes and not is_whole,
    )
    return RecordingHeader(
        policy=settings.schedule.policy,
        policies=replace(settings.policies, seats=settings.scheduler.max_batch_size),
        scheduler=scheduler,
        kv=_kv_shape(settings, report),
        depth=settings.workers.num_stages,
        cost=loaded.calibration.model,
        lookahead=loaded.lookahead,
    )


def _kv_shape(settings: Settings, report: WorkerReport) -> KVShape:
    """The size of the KV cache and its tiers in the workers, and of what is known of a store."""
    return KVShape(
        num_blocks=report.num_blocks,
        block_size=report.block_size,
        num_host_blocks=report.num_host_blocks,
        num_disk_blocks=len(report.disk_hashes) // HASH_BYTES,
        saves_on_host=settings.scheduler.reuses_prefixes,
        windows=report.windows,
        num_states=report.num_states,
        num_host_states=report.num_host_states,
        num_disk_states=len(report.disk_state_hashes) // HASH_BYTES,
        num_store_names=MAX_NAMES if report.kv_store_keys else 0,
    )


def _served_model(settings: Settings, loaded: LoadedModel, engine: Engine) -> ServedModel:
    report = loaded.report
    numbers = f"{report.dtype} {report.weights} {report.kv_dtype}"
    facts = f"{podway_version()} {loaded.name} {numbers} {report.device} {report.attention}"
    return ServedModel(
        name=loaded.name,
        aliases=settings.model.served_model_name[1:],
        sampling_defaults=loaded.sampling_defaults,
        created=unix_now(),
        fingerprint="fp_" + hashlib.sha256(facts.encode()).hexdigest()[:10],
        vocabulary=Vocabulary(report.vocab_size, frozenset(report.eos_token_ids)),
        tokenizer=PacedTokenizer(loaded.texts.tokenizer, lambda: engine.is_generating),
        template=loaded.texts.template,
        dialect=loaded.texts.dialect,
        trusts_request_templates=settings.model.trust_request_chat_template,
        pooling=report.pooling,
    )
