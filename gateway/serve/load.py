"""Load a model: find the checkpoint, start its workers, and read tokenizer and chat template.

    settings ─▶ checkpoint ─▶ workers (processes) ─▶ cost model ┐
                    └──────▶ tokenizer, template, dialect ──────┴─▶ LoadedModel

Adapters are imported here, by name.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from anyio.lowlevel import checkpoint

from engine.cost.profiler import ProbeLimits, nobody_waits
from engine.errors import StartupError
from engine.lora import LoraSpec
from engine.speculation.settings import MTP
from engine.transport.launcher import Launcher
from engine.transport.multiprocess import MultiprocessExecutor
from engine.transport.process import LocalLauncher
from engine.transport.trace import TraceFile
from engine.worker_settings import Kernels, WorkerReport, WorkerSettings
from gateway.loras import absolute
from gateway.ports import ChatTemplate, Dialect, GrammarChecker, Tokenizer
from gateway.schema.fields.sampling import SamplingDefaults
from gateway.serve.cores import count_replicas
from gateway.serve.cost.calibration import Calibration, calibrate, cost_facts, cost_file
from gateway.serve.lookahead import choose_lookahead, max_lookahead
from gateway.serve.model_checks import check_model, is_local, model_directory, projector_file
from gateway.serve.replicas import like_first, settings_of_replicas
from gateway.serve.saved import cache_folder, tokenizers_folder
from gateway.settings.generation_config import sampling_defaults
from gateway.settings.model import BUILTIN_MODEL
from gateway.settings.settings import Settings

OnProgress = Callable[[str, int, int], None]  # label, done, total

LAUNCHERS = {"ray": "adapters.cluster.ray:RayLauncher"}
ADAPTERS = {
    "generation_config": "adapters.models.checkpoint:read_generation_config",
    "tokenizer": "adapters.tokenizers:load_tokenizer",
    "template": "adapters.dialects:load_chat_template",
    "dialect": "adapters.dialects:choose_dialect",
    "grammar": "adapters.grammar.isolated:IsolatedCompiler",
}
TOKEN_TABLE = "adapters.tokenizers:load_token_table"


@dataclass(frozen=True, slots=True)
class TextAdapters:
    """Between text and token ids: tokenizer, chat template, dialect of tool calls, grammars."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    dialect: Dialect
    grammars: GrammarChecker


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to serve, with the executor and the report of each replica.
    `lookahead` is 0 or 1."""

    name: str
    directory: Path
    mmproj: Path | None  # the file of its image encoder
    executors: tuple[MultiprocessExecutor, ...]
    reports: tuple[WorkerReport, ...]
    texts: TextAdapters
    sampling_defaults: SamplingDefaults
    calibration: Calibration
    lookahead: int

    @property
    def executor(self) -> MultiprocessExecutor:
        """The one of the first replica."""
        return self.executors[0]

    @property
    def report(self) -> WorkerReport:
        """The one of the first replica."""
        return self.reports[0]

    @property
    def replicas(self) -> "list[LoadedModel]":
        """The same model with one replica, for each of them."""
        pairs = zip(self.executors, self.reports, strict=True)
        return [replace(self, executors=(one,), reports=(report,)) for one, report in pairs]


@asynccontextmanager
async def load_model(
    settings: Settings,
    progress: OnProgress,
    local: LocalLauncher | None = None,
    is_awaited: Callable[[], bool] = nobody_waits,
) -> AsyncIterator[LoadedModel]:
    """Start the workers and read the tokenizer at the same time; the workers end with the block.

    `local` starts workers on this machine; it is given by the command, which has checked a model
    that is here. A model that `is_awaited` is not measured. Raises `StartupError`.
    """
    directory = await asyncio.to_thread(model_directory, settings.model.source)
    if local is None or not is_local(settings.model.source):
        await asyncio.to_thread(check_model, settings, directory)
    config = await asyncio.to_thread(_adapter("generation_config"), directory)
    defaults = sampling_defaults(config, settings.model.override_generation_config)
    count = await asyncio.to_thread(count_replicas, settings)
    is_here = settings.launch.launcher == "local"
    own = await asyncio.to_thread(_worker_settings, settings, directory)
    workers = settings_of_replicas(own, count, is_local=is_here)
    stack = AsyncExitStack()
    try:
        executor = await _executor(settings, workers[0], stack, local)
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(executor.start(progress))
            reading = group.create_task(asyncio.to_thread(_text_adapters, settings, directory))
            await checkpoint()  # imports anyio's backend, which the first request would do
        report, texts = starting.result(), reading.result()
        if report.pooling is not None:
            await asyncio.to_thread(importlib.import_module, "numpy")  # for `gateway.pooling`
        stack.push_async_callback(texts.grammars.close)
        calibration = await _calibrate(settings, directory, executor, report, is_awaited)
        size = settings.workers.num_stages * settings.workers.num_ranks
        others = [
            like_first(each, report, 1 + number * size, is_local=is_here)
            for number, each in enumerate(workers[1:])
        ]
        executors = [await _executor(settings, each, stack) for each in others]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each.start(_ignore)) for each in executors]
        yield LoadedModel(
            name=served_name(settings),
            directory=directory,
            mmproj=Path(workers[0].mmproj) if workers[0].mmproj else None,
            executors=(executor, *executors),
            reports=(report, *[task.result() for task in tasks]),
            texts=texts,
            sampling_defaults=defaults,
            calibration=calibration,
            lookahead=choose_lookahead(settings, report, calibration.model, count),
        )
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    finally:
        await stack.aclose()


def _ignore(what: str, done: int, total: int) -> None:
    """The progress of the first replica stands for all."""


async def _executor(
    settings: Settings,
    worker: WorkerSettings,
    stack: AsyncExitStack,
    local: LocalLauncher | None = None,
) -> MultiprocessExecutor:
    """An executor, which `stack` closes, with its trace."""
    workers = settings.workers
    transport = replace(workers, depth=workers.num_stages + max_lookahead(settings))
    trace = None if settings.launch.trace is None else TraceFile(settings.launch.trace)
    if trace is not None:
        stack.callback(trace.close)
    launcher = await asyncio.to_thread(_launcher, settings, transport.worker) or local
    executor = MultiprocessExecutor(worker, transport, launcher=launcher, trace=trace)
    stack.push_async_callback(executor.close)
    return executor


async def _calibrate(
    settings: Settings,
    directory: Path,
    executor: MultiprocessExecutor,
    report: WorkerReport,
    is_awaited: Callable[[], bool],
) -> Calibration:
    file = cost_file(
        cost_facts(directory, report, settings.workers.num_stages, settings.workers.num_ranks),
        settings.schedule.cache_dir,
    )
    bounds = ProbeLimits(
        max_batch_size=settings.scheduler.max_batch_size,
        max_batch_tokens=settings.scheduler.max_batch_tokens,
        max_model_len=report.max_model_len,
        num_blocks=report.num_blocks,
        block_size=report.block_size,
        pools=report.pooling is not None,
        graphs=report.graphs,
    )
    return await calibrate(settings.schedule.cost_model, file, executor, bounds, is_awaited)


def _launcher(settings: Settings, worker: str) -> Launcher | None:
    """The launcher of the workers; None if this process starts them itself."""
    name = settings.launch.launcher
    if name == "local":
        return None
    try:
        launcher = resolve_name(LAUNCHERS[name])
    except ModuleNotFoundError as error:
        raise StartupError(
            f"--launcher {name} needs pip install podway[{name}]: {error}"
        ) from error
    gpus = int(settings.kernels.device == "cuda")
    threads = max(1, settings.kernels.threads)
    return cast("Launcher", launcher(worker, settings.launch.ray_address, threads, gpus))


def served_name(settings: Settings) -> str:
    """The first name that clients use for the model."""
    names = settings.model.served_model_name
    return names[0] if names else _name(settings.model.source)


def _name(model: str) -> str:
    """The model's name on the wire: a hub id as it is, a directory's last part, a file's stem."""
    path = Path(model.rpartition(":")[2]).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() and model != BUILTIN_MODEL else model


def _text_adapters(settings: Settings, directory: Path) -> TextAdapters:
    template = _adapter("template")(directory, settings.model.chat_template)
    source = "" if template is None else template.source
    return TextAdapters(
        _adapter("tokenizer")(directory, tokenizers_folder(settings.schedule.cache_dir)),
        template,
        _adapter("dialect")(source, settings.model.tool_dialect, settings.model.reasoning_dialect),
        _adapter("grammar")(TOKEN_TABLE, directory),
    )


def _adapter(role: str) -> Callable[..., Any]:
    function: Callable[..., Any] = resolve_name(ADAPTERS[role])
    return function


def kernels_of(settings: Settings) -> Kernels:
    """The settings of kernels with the directories of their caches."""
    kernels, cache = settings.kernels, cache_folder(settings.schedule.cache_dir)
    packed = Path(kernels.packed_cache or cache / "packed").expanduser().absolute()
    return replace(
        kernels,
        packed_cache="" if kernels.packed_cache == "off" else str(packed),
        kernel_choices=str(cache / "kernel_choices"),
    )


def _worker_settings(settings: Settings, directory: Path) -> WorkerSettings:
    speculation, tiers = settings.model.speculative_config, settings.tiers
    draft_model = "" if speculation is None else speculation.model
    disk = str(Path(tiers.disk_kv).expanduser()) if tiers.disk_kv else ""
    return WorkerSettings(
        model=str(directory),
        task=settings.model.task,
        mmproj=str(projector_file(settings, directory) or ""),
        kernels=kernels_of(settings),
        kv=settings.kv,
        tiers=replace(tiers, disk_kv=disk),
        max_model_len=settings.model.max_model_len,
        max_batch_tokens=settings.scheduler.max_batch_tokens,
        max_batch_size=settings.scheduler.max_batch_size,
        lookahead=max_lookahead(settings),
        loras=lora_specs(settings),
        max_lora_rank=settings.loras.max_lora_rank,
        draft_model=str(model_directory(draft_model)) if draft_model else "",
        has_mtp=speculation is not None and speculation.method == MTP,
        logs_json=settings.observe.log_format == "json",
    )


def lora_specs(settings: Settings) -> tuple[LoraSpec, ...]:
    """The adapters of `--lora`, with the ids 1, 2, …"""
    pairs = (value.partition("=")[::2] for value in settings.loras.lora)
    return tuple(LoraSpec(i, name, absolute(path)) for i, (name, path) in enumerate(pairs, 1))
