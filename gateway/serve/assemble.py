"""The doorway: from settings to a running server. Everything foreign is loaded here, by name.

settings ─▶ checkpoint ─▶ worker (a process) ┐
                └──────▶ tokenizer, template ┴─▶ scheduler ─▶ engine ─▶ app ─▶ server
"""

import asyncio
import hashlib
import importlib
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import quote

import uvloop
from platformdirs import user_cache_path, user_state_path

from engine.control.admission import Admission, SwapMode
from engine.control.event_recorder import RecordingHeader
from engine.control.scheduler import IterationScheduler, SchedulerSettings
from engine.cost.model import LiveCost
from engine.cost.profiler import ProbeLimits
from engine.errors import StartupError
from engine.events import Observer, ObserverGroup
from engine.loop import Engine
from engine.policy import PolicySettings
from engine.step import WorkerReport, WorkerSettings
from engine.transport.launcher import Launcher
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.transport.trace import TraceFile
from gateway.access.callers import BodyLimits, RequestLog
from gateway.access.credentials import Credentials, load_credentials
from gateway.access.grammar_check import GrammarCheck
from gateway.access.quotas import Quotas
from gateway.batch.lines import LineLimits
from gateway.batch.runner import BatchRunner
from gateway.observe.backpressure import LoopWatch
from gateway.observe.exposition import Exposition
from gateway.observe.metrics import Metrics
from gateway.observe.recording import recording
from gateway.schema.fields.sampling import Vocabulary
from gateway.serve.calibration import Calibration, CostFile, calibrate, facts_about
from gateway.serve.connection import ConnectionBounds
from gateway.serve.lookahead import chosen_lookahead, most_lookahead
from gateway.serve.server import Server, Signals, bind, raise_file_limit, unless_told
from gateway.serve.settings import BUILTIN_MODEL, IN_MEMORY, Settings
from gateway.service import Pace, ServedModel, Service
from gateway.store.files import FileLimits
from gateway.store.store import Store, open_named, open_or_forget, open_store
from gateway.web.app import build_app
from gateway.web.routes.batches import ENDPOINTS

if TYPE_CHECKING:
    from engine.grammar import GrammarCompiler
    from gateway.ports import ChatTemplate, Dialect, Tokenizer

OnProgress = Callable[[str, int, int], None]  # what, done, total
OnReady = Callable[[int, "LoadedModel"], None]  # the port, and what is served on it

TOKENISING_THREADS = 2
LAUNCHERS = {"ray": "adapters.cluster.ray:RayLauncher"}
ADAPTERS = {
    "checkpoint": "adapters.models.checkpoint:resolve_checkpoint",
    "tokenizer": "adapters.tokenizers:load_tokenizer",
    "template": "adapters.dialects:load_chat_template",
    "dialect": "adapters.dialects:choose_dialect",
    "token_table": "adapters.tokenizers:load_token_table",
    "grammar": "adapters.grammar:open_compiler",
}


@dataclass(frozen=True, slots=True)
class TextAdapters:
    """How the model reads and writes."""

    tokenizer: "Tokenizer"
    template: "ChatTemplate | None"
    dialect: "Dialect"
    grammars: "GrammarCompiler"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run: its name, its worker, how it reads and writes, its cost."""

    name: str
    directory: Path
    executor: MultiprocessExecutor
    report: WorkerReport
    texts: TextAdapters
    calibration: Calibration
    lookahead: int


class ControlPlane(NamedTuple):
    """Who decides, and who counts and answers for it."""

    scheduler: IterationScheduler
    metrics: Metrics
    quotas: Quotas


def serve(settings: Settings, *, progress: OnProgress, announce: OnReady) -> None:
    """Serve until told to stop. Raises `StartupError`, and `KeyboardInterrupt` after Ctrl-C."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, progress, announce))


async def _serve(settings: Settings, progress: OnProgress, announce: OnReady) -> None:
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(TOKENISING_THREADS, thread_name_prefix="tokenise")
    )
    gate = load_credentials(settings)
    with Signals() as signals, closing(bind(settings.host, settings.port)) as listener:
        if gate.has_files:
            signals.on_hangup(gate.reload)
        async with AsyncExitStack() as stack:
            loading = asyncio.create_task(
                stack.enter_async_context(_loaded(settings, progress)), name="load"
            )
            loaded = await unless_told(loading, signals)
            if loaded is not None:
                port = listener.getsockname()[1]
                store = _store(settings, loaded.name)
                stack.callback(store.close)
                cost = LiveCost(loaded.calibration.model)
                plane = _control_plane(settings, loaded, cost, stack)
                server = build_server(settings, loaded, plane, gate, store)
                await server.serve(listener, signals, lambda: announce(port, loaded))
                if loaded.calibration.file is not None:
                    loaded.calibration.file.save(cost.model)
        if signals.is_interrupt:
            raise KeyboardInterrupt


@asynccontextmanager
async def _loaded(settings: Settings, progress: OnProgress) -> AsyncIterator[LoadedModel]:
    """Find the checkpoint, start its worker and read its tokenizer meanwhile."""
    directory = await asyncio.to_thread(_directory, settings.model)
    keeping = MultiprocessSettings(
        num_stages=settings.pipeline_stages,
        num_ranks=settings.tensor_ranks,
        depth=settings.pipeline_stages + most_lookahead(settings),
        step_seconds=settings.step_seconds,
        max_restarts=settings.max_restarts,
    )
    trace = None if settings.trace is None else TraceFile(settings.trace)
    executor = MultiprocessExecutor(
        _worker_settings(settings, directory),
        keeping,
        launcher=await asyncio.to_thread(_launcher, settings, keeping.worker),
        trace=trace,
    )
    try:
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(executor.start(progress))
            reading = group.create_task(asyncio.to_thread(_texts, settings, directory))
        name = settings.served_model_name or _name(settings.model)
        report = starting.result()
        calibration = await _calibrated(settings, directory, executor, report)
        ahead = chosen_lookahead(settings, report, calibration.model)
        yield LoadedModel(name, directory, executor, report, reading.result(), calibration, ahead)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    finally:
        await executor.close()
        if trace is not None:
            trace.close()


async def _calibrated(
    settings: Settings, directory: Path, executor: MultiprocessExecutor, report: WorkerReport
) -> Calibration:
    file = CostFile.of(
        facts_about(directory, report, settings.pipeline_stages, settings.tensor_ranks),
        settings.cache_dir,
    )
    bounds = ProbeLimits(
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_model_len=report.max_model_len,
        num_blocks=report.num_blocks,
        block_size=report.block_size,
    )
    return await calibrate(settings.cost_model, file, executor, bounds)


def _launcher(settings: Settings, worker: str) -> Launcher | None:
    """Who starts the workers, None for this process itself."""
    if settings.launcher == "local":
        return None
    try:
        launcher = _by_name(LAUNCHERS[settings.launcher])
    except ModuleNotFoundError as error:
        raise StartupError(
            f"--launcher {settings.launcher} needs pip install podway[{settings.launcher}]: {error}"
        ) from error
    return cast("Launcher", launcher(worker, settings.ray_address, max(1, settings.threads)))


def _directory(model: str) -> Path:
    if model == BUILTIN_MODEL:
        return Path(str(files("adapters").joinpath("builtin")))
    return cast("Path", _adapter("checkpoint")(model))


def _name(model: str) -> str:
    """A hub id as it is, a directory by its last part, a file without its ending."""
    path = Path(model.rpartition(":")[2]).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() and model != BUILTIN_MODEL else model


def _texts(settings: Settings, directory: Path) -> TextAdapters:
    template = _adapter("template")(directory, settings.chat_template)
    source = "" if template is None else template.source
    tokenizer = _adapter("tokenizer")(directory)
    table = _adapter("token_table")(directory, tokenizer)
    return TextAdapters(
        tokenizer,
        template,
        _adapter("dialect")(source, settings.tool_dialect, settings.reasoning_dialect),
        _adapter("grammar")(table, len(table.tokens)),
    )


def _adapter(role: str) -> Callable[..., Any]:
    return _by_name(ADAPTERS[role])


def _by_name(target: str) -> Callable[..., Any]:
    module, name = target.split(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))


def _worker_settings(settings: Settings, directory: Path) -> WorkerSettings:
    return WorkerSettings(
        model=str(directory),
        dtype=settings.dtype,
        weights=settings.weights,
        activation_bits=settings.activation_bits,
        kv_dtype=settings.kv_cache_dtype,
        device=settings.device,
        attention=settings.attention,
        block_size=settings.block_size,
        kv_slots=settings.kv_slots or 0,
        kv_bytes=int(settings.kv_memory or 0),
        host_kv_bytes=int(settings.host_kv_memory),
        max_model_len=settings.max_model_len,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_size=settings.max_batch_size,
        threads=settings.threads,
        thread_wait=settings.thread_wait,
        lookahead=most_lookahead(settings),
        cache_dir=str(settings.cache_dir or user_cache_path("podway", appauthor=False)),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        cuda_graphs=settings.cuda_graphs,
    )


def _store(settings: Settings, model: str) -> Store:
    """What is kept has a file for each model, unless another is named, or none."""
    limits = FileLimits(file_bytes=int(settings.max_file_bytes))
    if settings.store == IN_MEMORY:
        return open_store(None, limits)
    if settings.store is not None:
        return open_named(Path(settings.store).expanduser(), limits)
    folder = user_state_path("podway", appauthor=False)
    return open_or_forget(folder / f"{quote(model, safe='')}.sqlite", limits)


def build_server(
    settings: Settings, loaded: LoadedModel, plane: ControlPlane, gate: Credentials, store: Store
) -> Server:
    """The gateway over a loaded model and its scheduler."""
    scheduler, metrics, quotas = plane
    ahead = loaded.lookahead
    depth = settings.pipeline_stages + ahead
    engine = Engine(scheduler, loaded.executor, time.perf_counter, lookahead=ahead, depth=depth)
    watch = LoopWatch(time.perf_counter, metrics.loop_lag)
    service = Service(
        engine=engine,
        model=_served_model(loaded),
        grammars=GrammarCheck(loaded.texts.grammars),
        exposition=Exposition(metrics, scheduler, loaded.name),
        watch=watch,
        clock=time.perf_counter,
        unix_now=_unix_now,
        random=random.SystemRandom(),
        keys=gate.keys,
        limits=BodyLimits(int(settings.max_body_bytes), settings.body_seconds),
        pace=Pace(stall=settings.stall_seconds),
        quotas=quotas,
        cors_origins=settings.cors_origin,
        store=store,
    )
    bounds = ConnectionBounds(
        settings.max_connections or raise_file_limit(),
        settings.body_seconds,
        settings.stall_seconds,
    )
    limits = LineLimits(line_bytes=int(settings.max_body_bytes))
    runner = BatchRunner(service, ENDPOINTS, settings.max_batch_size, limits)
    app = build_app(service)
    return Server(app, engine, watch, runner, settings.drain_seconds, bounds, gate.tls)


def _control_plane(
    settings: Settings, loaded: LoadedModel, cost: LiveCost, stack: AsyncExitStack
) -> ControlPlane:
    """The scheduler and those who are told of all that it does."""
    terms = _admission_settings(settings, loaded)
    metrics, quotas = Metrics(), Quotas()
    observers: list[Observer] = [metrics, RequestLog(), quotas]
    if settings.record is not None:
        observers.append(stack.enter_context(recording(settings.record, terms)))
    return ControlPlane(terms.build(cost, ObserverGroup(*observers)), metrics, quotas)


def _admission_settings(settings: Settings, loaded: LoadedModel) -> RecordingHeader:
    """The terms on which requests are served."""
    report = loaded.report
    bounds = SchedulerSettings(
        max_model_len=report.max_model_len,
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_step_seconds=settings.max_step_seconds or inf,
        admission=Admission(settings.admission),
        max_queue_requests=settings.max_queue_requests,
        max_queue_tokens=settings.max_queue_tokens,
        reuses_prefixes=settings.prefix_cache,
        swap=SwapMode(settings.swap),
    )
    return RecordingHeader(
        policy=settings.policy,
        policies=PolicySettings(seats=settings.max_batch_size),
        scheduler=bounds,
        num_blocks=report.num_blocks,
        block_size=report.block_size,
        depth=settings.pipeline_stages,
        cost=loaded.calibration.model,
        lookahead=loaded.lookahead,
        num_host_blocks=report.num_host_blocks,
    )


def _served_model(loaded: LoadedModel) -> ServedModel:
    report = loaded.report
    numbers = f"{report.dtype} {report.weights} {report.kv_dtype}"
    facts = f"{version('podway')} {loaded.name} {numbers} {report.device} {report.attention}"
    return ServedModel(
        name=loaded.name,
        created=_unix_now(),
        fingerprint="fp_" + hashlib.sha256(facts.encode()).hexdigest()[:10],
        vocabulary=Vocabulary(report.vocab_size, frozenset(report.eos_token_ids)),
        tokenizer=loaded.texts.tokenizer,
        template=loaded.texts.template,
        dialect=loaded.texts.dialect,
    )


def _unix_now() -> int:
    return int(datetime.now(UTC).timestamp())
