"""Open a model: load it, and build its scheduler and its engine over its workers.

    LoadedModel ─▶ scheduler (with its observers) ─▶ engine ─▶ Serving

What is counted of a model goes on when it is unloaded and loaded again.
"""

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from engine.control.event_recorder import RecordingHeader
from engine.control.scheduler import IterationScheduler
from engine.cost.live import LiveCost
from engine.cost.profiler import nobody_waits
from engine.iteration import Observer, ObserverGroup
from engine.kv_shape import KVShape
from engine.kv_store import MAX_NAMES, open_store
from engine.loop import Engine
from engine.replicas.replica import QueueDelay, Replica
from engine.replicas.replicas import Replicas, ServingEngine
from engine.speculation.drafter import Drafter
from engine.step import HASH_BYTES, PageKind
from engine.transport.process import LocalLauncher
from engine.turns import Turn, Turns
from engine.worker_settings import WorkerReport
from gateway.access.callers import Quotas
from gateway.access.grammar_check import GrammarCheck
from gateway.generation.prompt import PacedTokenizer
from gateway.groups.group import ServedModel, Serving
from gateway.loras import LoraRegistry
from gateway.observe.kv_events import KVEvents, ZmqPublisher, topic_of
from gateway.observe.live import LiveView
from gateway.observe.metrics import LoraUsage, Metrics, StepMetrics
from gateway.observe.readings import Readings
from gateway.observe.recording import recording
from gateway.observe.request_log import RequestLog
from gateway.observe.timelines import Timelines
from gateway.observe.traces import Traces
from gateway.schema.fields.sampling import Vocabulary
from gateway.serve.images import Images, open_images
from gateway.serve.kv_lookup import KVLookup
from gateway.serve.load import LoadedModel, OnProgress, load_model, lora_specs
from gateway.serve.memory import loaded_bytes
from gateway.serve.replicas import LorasOfReplicas
from gateway.service import unix_now
from gateway.settings.settings import Settings
from gateway.version import podway_version

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedObservers:
    """What observes the requests of all models."""

    request_log: RequestLog
    metrics: Metrics  # the server's metrics
    quotas: Quotas = field(default_factory=Quotas)
    traces: Traces | None = None


class ModelOpener:
    """Opens one model, again after it has been closed."""

    def __init__(
        self,
        settings: Settings,
        shared: SharedObservers,
        turns: Turns | None = None,
        launcher: LocalLauncher | None = None,
        progress: OnProgress = lambda what, done, total: None,
    ) -> None:
        """With `turns`, other models compute on the same cores. `launcher` starts the workers of
        the first load."""
        self.settings = settings
        self.metrics = Metrics()
        self.is_awaited: Callable[[], bool] = nobody_waits  # whether a request waits for the load
        self.latest: LoadedModel  # from the first load on
        self._shared = shared
        self._turns = turns
        self._turn: Turn | None = None  # the model's turn while it is loaded
        self._launcher = launcher
        self._progress = progress
        self._live = LiveView()
        self._timelines = Timelines()
        self._lora_usage = LoraUsage(settings.loras.max_loras)
        if shared.traces is not None:
            self._timelines.report_to(shared.traces)

    def share_disk(self) -> None:
        """Let later loads use the disk tier while the server that succeeds this one has it."""
        tiers = replace(self.settings.tiers, disk_kv_shared=True)
        self.settings = replace(self.settings, tiers=tiers)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Serving]:
        """Load the model; its workers end with the block. Raises `StartupError`."""
        launcher, self._launcher = self._launcher, None
        async with AsyncExitStack() as stack:
            loaded = await stack.enter_async_context(
                load_model(self.settings, self._progress, launcher, self.is_awaited)
            )
            self.latest = loaded
            costs = [LiveCost(loaded.calibration.model) for _ in loaded.replicas]
            self._turn = self._joined_turn(loaded)
            members = [
                self._member(replica, cost, stack, number)
                for number, (replica, cost) in enumerate(zip(loaded.replicas, costs, strict=True))
            ]
            engine: ServingEngine = members[0].engine
            if len(members) > 1:
                engine = Replicas(members, time.perf_counter)
            images = open_images(self.settings.images, loaded, stack)
            yield self._serving(loaded, engine, images)
            cost = costs[0]
            if (errors := cost.errors.summary()) is not None:
                logger.info("error of predicted iteration times: %s", errors)
            loaded.calibration.update(cost)

    def _joined_turn(self, loaded: LoadedModel) -> Turn | None:
        """The model's turn on the cores, if other models compute on them."""
        if self._turns is None or not _computes_here(self.settings, loaded.report):
            return None
        return self._turns.join(self.settings.terms.share)

    def _member(
        self, loaded: LoadedModel, cost: LiveCost, stack: AsyncExitStack, number: int
    ) -> Replica:
        """One of the model's replicas."""
        delay = QueueDelay(cost, self.settings.scheduler.max_batch_size)
        timelines = self._timelines if number == 0 else self._timelines.beside()
        scheduler = self._scheduler(loaded, cost, stack, timelines, delay)
        return Replica(self._engine(loaded, scheduler, stack), delay)

    def _scheduler(
        self,
        loaded: LoadedModel,
        cost: LiveCost,
        stack: AsyncExitStack,
        timelines: Timelines,
        delay: QueueDelay,
    ) -> IterationScheduler:
        """The scheduler with its observers. `stack` closes the recording, if there is one."""
        settings, shared = self.settings, self._shared
        header = _recording_header(settings, loaded)
        observers: list[Observer] = [
            self.metrics,
            StepMetrics(self.metrics),
            self.metrics.requests,
            shared.request_log,
            shared.quotas,
            self._live,
            timelines,
            self._lora_usage,
            delay,
        ]
        if settings.observe.record is not None:
            observers.append(stack.enter_context(recording(settings.observe.record, header)))
        kv_events = _kv_events(settings, loaded, self.metrics, stack)
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
        tiers = loaded.report.tiers
        hashes, state_hashes = tiers.disk_hashes, tiers.disk_state_hashes
        search.restore_disk({PageKind.BLOCK: hashes, PageKind.SNAPSHOT: state_hashes})
        timelines.attach(scheduler)
        return scheduler

    def _engine(
        self, loaded: LoadedModel, scheduler: IterationScheduler, stack: AsyncExitStack
    ) -> Engine:
        settings, turn = self.settings, self._turn
        return Engine(
            scheduler,
            loaded.executor,
            time.perf_counter,
            lookahead=loaded.lookahead,
            depth=settings.workers.num_stages + loaded.lookahead,
            lookup=_kv_lookup(settings, loaded, self.metrics, stack),
            send_pixels=None if loaded.report.encoder is None else loaded.executor.send_pixels,
            turn=turn.part() if turn is not None and settings.launch.replicas != 1 else turn,
        )

    def _serving(self, loaded: LoadedModel, engine: ServingEngine, images: Images) -> Serving:
        model = _served_model(self.settings, loaded, engine)
        model = replace(model, images=images.reader, no_images=images.refusal)
        loader = LorasOfReplicas(engine.engines, loaded.executors)
        loras = LoraRegistry(loader, self._lora_usage, model.names, engine.fail_lora)
        first, *others = [each.scheduler for each in engine.engines]
        loras.start(lora_specs(self.settings), loaded.report.loras, unix_now())
        return Serving(
            engine=engine,
            model=model,
            grammars=GrammarCheck(loaded.texts.grammars),
            readings=Readings(self.metrics, first, self._lora_usage, tuple(others)),
            live=self._live,
            timelines=self._timelines,
            loras=loras,
            num_bytes=sum(loaded_bytes(self.settings, report) for report in loaded.reports),
        )


def _computes_here(settings: Settings, report: WorkerReport) -> bool:
    """Whether the workers compute on the cores of this machine."""
    return settings.launch.launcher == "local" and report.device == "cpu"


def _kv_lookup(
    settings: Settings, loaded: LoadedModel, metrics: Metrics, stack: AsyncExitStack
) -> KVLookup | None:
    """A client of the shared store, which the workers read and write."""
    keys = loaded.report.tiers.kv_store_keys
    if not keys:
        return None
    store = open_store(settings.tiers.kv_store, keys, lends_memory=False)
    lookup = KVLookup(store, metrics)
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
        num_host_blocks=report.tiers.num_host_blocks,
        num_disk_blocks=len(report.tiers.disk_hashes) // HASH_BYTES,
        saves_on_host=settings.scheduler.reuses_prefixes,
        windows=report.windows,
        num_states=report.num_states,
        num_host_states=report.tiers.num_host_states,
        num_disk_states=len(report.tiers.disk_state_hashes) // HASH_BYTES,
        num_store_names=MAX_NAMES if report.tiers.kv_store_keys else 0,
    )


def _served_model(settings: Settings, loaded: LoadedModel, engine: ServingEngine) -> ServedModel:
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
