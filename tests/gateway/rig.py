"""The real app over the real engine in virtual time, with a scripted model.

Tokens are bytes and 256 is the end. An iteration takes `STEP` seconds. Request `i` (counted
from 0) generates the `i`-th of the given texts, then the end token.
"""

import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.types import ASGIApp

from adapters.dialects.jinja_template import compile_request_template
from adapters.grammar import open_compiler
from adapters.grammar.compile_process import first_error
from engine.control.admission import Admission
from engine.control.scheduler import UNMEASURED, IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.events import NullObserver, ObserverGroup
from engine.grammar import GrammarCompiler, TokenTable
from engine.kv.ledger import KVLedger
from engine.loop import Engine
from engine.policy import PolicySettings, build
from engine.pooling import PoolingReport
from engine.request import Request
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.speculation.drafter import Drafter
from engine.speculation.settings import SpeculationSettings
from engine.step import Grammar, Step, StepEntry, StepResult, TokenLogprobs
from gateway.access.callers import BodyLimits
from gateway.access.grammar_check import GrammarCheck
from gateway.access.key_file import Allowance, KeyDefaults
from gateway.access.keys import Keys
from gateway.access.origins import OriginPolicy
from gateway.access.quotas import Quotas
from gateway.batch.lines import LineLimits
from gateway.batch.runner import BatchRunner
from gateway.loras import LoraRegistry
from gateway.observe.backpressure import LoopWatch
from gateway.observe.exposition import Exposition
from gateway.observe.live import LiveView
from gateway.observe.loras import LoraUsage
from gateway.observe.metrics import Metrics
from gateway.observe.request_log import RequestLog
from gateway.observe.timelines import Timelines
from gateway.ports import Dialect
from gateway.schema.fields.sampling import SamplingDefaults, Vocabulary
from gateway.service import Pace, ServedModel, Service
from gateway.store.database import StoreExecutor
from gateway.store.responses import ResponseLimits
from gateway.store.store import open_store
from gateway.store.usage import StoreLimits
from gateway.web.app import build_app
from gateway.web.routes.batches import ENDPOINTS
from tests.asgi import Client
from tests.gateway.lora_loader import ScriptedLoader

T = TypeVar("T")
STEP = 0.25
EPOCH = 1_700_000_001
END = 256
MODEL = "org/tiny-bytes"
CONTEXT = 200
USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


class ByteDecoder:
    """Each id is a byte; the end token decodes to nothing."""

    def feed(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b""


class ByteTokenizer:
    """UTF-8 bytes as ids."""

    vocab_size = END + 1
    special_ids = frozenset({END})
    special_tokens: Mapping[str, int] = MappingProxyType({"<end>": END})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        ids = [*first.encode(), END]
        return [*ids, *second.encode(), END], len(ids)

    def decoder(self) -> ByteDecoder:
        return ByteDecoder()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b"<end>"


def byte_grammars() -> GrammarCompiler:
    """A grammar compiler over bytes with the end token `END`."""
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    table = TokenTable(tokens, {"<end>": END}, lambda text: list(text.encode()))
    return open_compiler(table, END + 1)


class CheckedOnLoop:
    """A `GrammarChecker` that compiles on the event loop, since virtual time has no processes."""

    def __init__(self) -> None:
        self._compiler = byte_grammars()

    async def check(self, grammar: Grammar) -> str | None:
        return first_error(self._compiler, grammar)

    async def close(self) -> None: ...


class PlainTemplate:
    """`role:content` lines."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        names = [tool["function"]["name"] for tool in kwargs.get("tools", ())]
        lines = [f"tools:{','.join(names)}\n"] if names else []
        return "".join((*lines, *(f"{m['role']}:{m['content']}\n" for m in messages)))

    async def render_source(
        self,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        template = compile_request_template(source, {})
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)


class ScriptedTexts:
    """The sampled tokens: the given texts in order of arrival, repeated."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts: list[list[int]] = [[*text.encode(), END] for text in texts]
        self._starts: dict[int, int] = {}

    def __call__(self, entry: StepEntry) -> int:
        position = entry.start + len(entry.tokens)
        start = self._starts.setdefault(entry.request_id, position)
        text = self._texts[entry.request_id % len(self._texts)]
        return text[min(position - start, len(text) - 1)]


class Inline:
    """The store's `StoreExecutor` without threads."""

    async def __call__(self, work: Callable[[], T]) -> T:
        return work()

    def close(self) -> None:
        return None


class ScoringExecutor(SimulatedExecutor):
    """Reports log-probabilities where requested: -0.01 for token 1, -0.02 for token 2, …

    The most likely tokens are the sampled one and those with the next higher ids. A prompt is
    pooled into the vector of `vector_of`.
    """

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        plain = super().submit(step)
        pooled = [entry for entry in step.entries if entry.pooling is not None]
        if pooled:
            vectors = tuple(vector_of(entry) for entry in pooled)
            changed: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
            plain.add_done_callback(
                lambda done: changed.set_result(replace(done.result(), vectors=vectors))
            )
            return changed
        entries = [entry for entry in step.entries if entry.sample is not None]
        samples = [entry.sample for entry in entries if entry.sample is not None]
        targets = [entry.prompt_logprobs for entry in step.entries]
        if not any(targets) and all(sample.logprobs is None for sample in samples):
            return plain
        scored: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

        def score(done: "asyncio.Future[StepResult]") -> None:
            result = done.result()
            num_accepted = iter(result.num_accepted)
            counts = [1 + next(num_accepted) if entry.num_drafts else 1 for entry in entries]
            per_token = [s for s, count in zip(samples, counts, strict=True) for _ in range(count)]
            sampled = zip(per_token, result.tokens, strict=True)
            scored.set_result(
                replace(
                    result,
                    logprobs=tuple(
                        None if sample.logprobs is None else scores_of(token, sample.logprobs)
                        for sample, token in sampled
                    ),
                    prompt_logprobs=tuple(
                        () if t is None else tuple(scores_of(i, t.top) for i in t.ids)
                        for t in targets
                    ),
                )
            )

        plain.add_done_callback(score)
        return scored


def vector_of(entry: StepEntry) -> bytes:
    """The vector of a prompt in the rig: four numbers, and fewer if `dimensions` says so."""
    numbers = (entry.start + len(entry.tokens), *entry.tokens[:2], entry.tokens[-1], 0.5)[:4]
    assert entry.pooling is not None, "a pooling entry"
    if entry.pooling.first_len is not None:  # a pair: its second text decides
        numbers = (entry.tokens[entry.pooling.first_len],)
    return array("f", numbers[: entry.pooling.dimensions]).tobytes()


def scores_of(token: int, num_top: int) -> TokenLogprobs:
    """The log-probabilities of a token in the rig."""
    top = ((other, -other / 100) for other in range(token, token + num_top))
    return TokenLogprobs(-token / 100, 1, tuple(top))


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

    @property
    def engine(self) -> Engine:
        return self.service.engine


class Ends(NullObserver):
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
            running = group.create_task(rig.engine.run())
            batching = group.create_task(rig.runner.run())
            await scene(rig)
            batching.cancel()
            await asyncio.sleep(2 * STEP)
            running.cancel()
        rig.service.store.close()
        scheduler = rig.engine.scheduler
        assert not scheduler.pool, scheduler
        assert scheduler.ledger.num_held == 0, scheduler
        return rig

    return run(main())


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
            itl_goal=setting.itl_goal,
            max_queue_requests=setting.max_queue_requests,
            max_queue_tokens=setting.max_queue_tokens,
            admission=setting.admission,
            reuses_prefixes=setting.prefix_cache,
        ),
        KVLedger(setting.num_blocks, 1, setting.num_host_blocks),
        build(setting.policy, live, PolicySettings(seats=setting.max_batch_size)),
        ObserverGroup(metrics, request_log, ends, quotas, view, timelines, lora_usage),
        live,
        Drafter.build(setting.speculation, LiveCost(cost)) if setting.speculation else None,
    )
    timelines.attach(scheduler)
    store = open_store(
        setting.store, setting.files, setting.store_executor(), setting.responses, clock
    )
    executor = ScoringExecutor(cost, next_token=ScriptedTexts(setting.texts))
    engine = Engine(scheduler, executor, clock)
    service = Service(
        engine=engine,
        model=ServedModel(
            name=MODEL,
            created=1_700_000_000,
            fingerprint="fp_test",
            vocabulary=Vocabulary(END + 1, frozenset({END})),
            tokenizer=ByteTokenizer(),
            template=PlainTemplate(),
            dialect=setting.dialect,
            trusts_request_templates=setting.trusts_request_templates,
            aliases=setting.aliases,
            sampling_defaults=setting.sampling_defaults,
            pooling=setting.pooling,
        ),
        grammars=GrammarCheck(CheckedOnLoop()),
        exposition=Exposition(metrics, scheduler, MODEL, store.database, request_log, lora_usage),
        loras=LoraRegistry(loader, lora_usage, (MODEL, *setting.aliases), engine.fail_lora),
        watch=LoopWatch(clock, metrics.loop_lag, spent=lambda: 0.0),
        clock=clock,
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
        live=view,
        timelines=timelines,
        limits=BodyLimits(setting.max_body_bytes, seconds=10.0),
        pace=setting.pace,
        store=store,
        request_log=request_log,
    )
    runner = BatchRunner(service, ENDPOINTS, setting.max_batch_size, setting.lines)
    app = build_app(service)
    return Rig(app, Client(app), service, metrics, ends.requests, runner, loader)


def chat(**fields: Any) -> dict[str, Any]:
    """A chat request's body."""
    return {"model": MODEL, "messages": USER, **fields}


def text(**fields: Any) -> dict[str, Any]:
    """A text completion request's body."""
    return {"model": MODEL, "prompt": "ab", **fields}
