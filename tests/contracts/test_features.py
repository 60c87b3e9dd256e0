"""Features on each kind of device: each is tested here, or rejected with an error that names it.

The README of `engine` has the same table; when they differ, the last test prints the right one.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adapters
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import StartupError
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.kv_store import Bytes
from engine.loop import Engine
from engine.lora import LoraSpec
from engine.policy.fcfs import FirstComeFirstServed
from engine.pooling import PoolSpec
from engine.replicas.replica import QueueDelay, Replica
from engine.replicas.replicas import Replicas
from engine.request import RequestSpec
from engine.speculation.drafter import Drafter
from engine.step import (
    HASH_BYTES,
    BlockMove,
    Direction,
    Page,
    PageKind,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
    Tier,
)
from engine.worker.cuda.device import CudaDevice
from engine.worker.process.kept_kv import KeptKV
from engine.worker.process.worker import Worker
from tests.engine.worker.cuda.fleet import gpus
from tests.engine.worker.cuda.launching import OnStandIns, on_stand_ins
from tests.engine.worker.cuda.standing import StandingGpu
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker, settings_for
from tests.engine.worker.process.fleet import Fleet, fleet
from tests.gpu.pairs import FLOAT32, on_gpu, settings_on
from tests.inline import Mortal, RunsSteps, play, read_all
from tests.models.checkpoints import make_checkpoint
from tests.models.drafts import a_drafter, a_model_drafter, first_layers
from tests.models.encoders import describe_pooling, make_encoder
from tests.models.images import Prompt, picture
from tests.models.images import make_checkpoint as make_vision_checkpoint
from tests.models.loras import make_lora
from tests.models.mtp import make_mtp_checkpoint
from tests.scheduling import HAND_COST
from tests.worker_settings import changed

BUILTIN = Path(adapters.__file__).parent / "builtin"
README = Path(__file__).parents[2] / "engine" / "README.md"
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=5)
LIMITS: Mapping[str, Any] = {"max_batch_size": 4, "max_batch_tokens": 64}  # few graphs to capture
SPECS = [
    RequestSpec((5, 7, 11), 9, GREEDY),
    RequestSpec(tuple(range(3, 20)), 8, SEEDED),
    RequestSpec((9, 4), 9, replace(SEEDED, presence_penalty=1.2)),
    RequestSpec((8,) * 6, 7, replace(GREEDY, repetition_penalty=1.3)),
]


@dataclass
class Bench:
    """Loads workers of one kind of device."""

    device: str
    folder: Path
    patch: pytest.MonkeyPatch
    made: list[OnStandIns] = field(default_factory=list)

    def load(self, model: Path, **changes: Any) -> RunsSteps:
        """A worker; on the stand-in its steps run within the rules of a step."""
        if self.device == "cuda":
            self.made.append(on_stand_ins(model, **LIMITS, **changes))
            return self.made[-1]
        if self.device == FLOAT32:
            settings = settings_on(FLOAT32, model, **LIMITS, **changes)
            return Worker.load(settings, lambda *_: None)
        return Worker.load(changed(settings_for(model), **LIMITS, **changes), lambda *_: None)

    def load_lora(self, worker: RunsSteps, spec: LoraSpec) -> None:
        loaded = worker.worker if isinstance(worker, OnStandIns) else worker
        assert isinstance(loaded, Worker)
        assert not loaded.load_lora(spec).error

    def shards(self, model: Path, stages: int, ranks: int) -> AbstractContextManager[Fleet]:
        return (
            self._gpus(model, stages, ranks)
            if self.device == "cuda"
            else fleet(model, stages, ranks, lookahead=1)
        )

    @contextmanager
    def _gpus(self, model: Path, stages: int, ranks: int) -> Iterator[Fleet]:
        changes = {**LIMITS, "dtype": "float32", "lookahead": 1}
        with gpus(model, stages, ranks, changes, has_graphs=True) as (workers, _):
            yield workers


def texts(worker: RunsSteps, drafter: Drafter | None = None, **ways: object) -> list[list[int]]:
    """The tokens of all requests, which are served at once."""
    outcomes = play(worker, SPECS, drafter=drafter, **LIMITS, **ways)  # type: ignore[arg-type]
    assert all(outcome.error is None for outcome in outcomes)
    return [outcome.tokens for outcome in outcomes]


def looks_ahead(bench: Bench) -> None:
    model = make_checkpoint(bench.folder)
    assert texts(bench.load(model, lookahead=1), lookahead=1) == texts(load_worker(model))


def speculates(bench: Bench) -> None:
    model = make_checkpoint(bench.folder)
    expected = texts(load_worker(model))
    worker = bench.load(model, lookahead=1)
    assert texts(worker, a_drafter(expected), lookahead=1) == expected


def has_draft_model(bench: Bench) -> None:
    draft = first_layers(BUILTIN, bench.folder / "draft", 1)
    expected = texts(load_worker(BUILTIN))
    worker = bench.load(BUILTIN, draft_model=str(draft), lookahead=1, max_model_len=256)
    assert worker.report.num_draft_parameters
    assert texts(worker, a_model_drafter(), lookahead=1) == expected


def predicts_several_tokens(bench: Bench) -> None:
    model = make_mtp_checkpoint(bench.folder)
    worker = bench.load(model, has_mtp=True, lookahead=1)
    assert texts(worker, a_model_drafter(), lookahead=1) == texts(load_worker(model))


def is_recurrent(bench: Bench) -> None:
    model = make_checkpoint(bench.folder, "qwen3_5")
    expected = texts(load_worker(model))
    worker = bench.load(model, lookahead=1, host_kv_memory=1 << 18)
    assert texts(worker, lookahead=1, num_blocks=24, saves_on_host=True) == expected
    assert texts(worker, a_drafter(expected), lookahead=1) == expected


def _make_encoder(folder: Path) -> Path:
    make_encoder("bert").save_pretrained(folder)
    describe_pooling(folder, "mean_tokens")
    return folder


def pools(bench: Bench) -> None:
    model = _make_encoder(bench.folder)
    entries = [
        StepEntry(RequestId(number), 0, tokens, bytes(4 * 8), None, pooling=PoolSpec())
        for number, tokens in enumerate([(5, 6, 7), (8, 9, 10, 11, 12)])
    ]
    step = Step(StepId(0), tuple(entries))
    found, expected = (
        [np.frombuffer(vector, "<f4") for vector in worker.run(step).vectors]
        for worker in (
            bench.load(model, task="embed"),
            Worker.load(changed(settings_for(model), task="embed"), lambda *_: None),
        )
    )
    assert len(found) == 2
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def has_loras(bench: Bench) -> None:
    model = make_checkpoint(bench.folder / "base")
    spec = LoraSpec(1, "one", str(make_lora(bench.folder / "one")))
    plain = load_worker(model)
    assert not plain.load_lora(spec).error
    worker = bench.load(model)
    bench.load_lora(worker, spec)
    assert adapted(worker) == adapted(plain)


def adapted(worker: RunsSteps) -> list[tuple[int, ...]]:
    """Tokens of two requests, one of them with the adapter, and of both without."""
    driver, tokens = Driver(worker), []  # type: ignore[arg-type]
    feeds = [[3, 7, 11], [4, 7, 11]]
    for number in range(6):
        entries = [driver.entry(at, feed, SampleSpec(GREEDY)) for at, feed in enumerate(feeds)]
        step = Step(StepId(number), (entries[0]._replace(lora_id=1), entries[1]))
        tokens.append(worker.run(step).tokens)
        feeds = [[token] for token in tokens[-1]]
    return tokens


def is_quantized(bench: Bench, weights: str) -> None:
    """The most likely token of a prompt has nearly the log-probability that floats give it.

    A GPU computes in bfloat16."""
    model = make_checkpoint(bench.folder, "llama")
    settings = settings_for(model, "cpu", dtype="float32", weights=weights)
    device = None
    if bench.device == "cuda":
        settings = settings_for(
            model, "reference", dtype="bfloat16", weights=weights, kv_dtype="auto"
        )
        device = CudaDevice(settings, StandingGpu(total_bytes=1 << 31))
    if bench.device == FLOAT32:
        settings = changed(settings_on("cuda", model, **LIMITS), weights=weights)
    worker = Worker.load(settings, lambda *_: None, device)
    step = Step(
        StepId(0),
        (StepEntry(RequestId(0), 0, (5, 6, 7), bytes(4), SampleSpec(GREEDY, logprobs=3)),),
    )
    (exact,), (found,) = (each.run(step).logprobs for each in (load_worker(model), worker))
    assert exact is not None
    assert found is not None
    assert found.logprob == pytest.approx(exact.logprob, abs=0.3)


def keeps_on_disk(bench: Bench) -> None:
    model = make_checkpoint(bench.folder / "model", "qwen3_5")
    ways: dict[str, object] = {"disk_kv": str(bench.folder / "kv"), "disk_kv_memory": 1 << 20}
    expected = texts(load_worker(model))
    worker = bench.load(model, **ways)
    assert texts(worker) == expected
    kept_by(worker).close()
    again = bench.load(model, **ways)
    assert any(again.report.tiers.disk_hashes)
    assert texts(again) == expected
    kept_by(again).close()


def kept_by(worker: RunsSteps) -> KeptKV:
    loaded = worker.worker if isinstance(worker, OnStandIns) else worker
    assert isinstance(loaded, Worker)
    return loaded.parts.kept


class Memory:
    """A shared store in a dictionary."""

    num_slots = 1 << 10

    def __init__(self, *_: object, **__: object) -> None:
        self.contents: dict[bytes, Bytes] = {}

    def write(self, slot: int, name: bytes, content: Bytes) -> None:
        self.contents[name] = content.copy()

    def read(self, slots: Sequence[int], names: Sequence[bytes]) -> list[Bytes | None]:
        return [self.contents.get(name) for name in names]

    def wait(self) -> None:
        """Everything is written."""

    def close(self) -> None:
        """Nothing is open."""


def block_move(direction: Direction, block: int) -> BlockMove:
    """A block to or from slot 0 of the store."""
    device, slot = (np.array([at], "<i4").tobytes() for at in (block, 0))
    name = bytes(range(HASH_BYTES))
    return BlockMove(direction, device, slot, is_awaited=True, tier=Tier.STORE, hashes=name)


def keeps_in_a_store(bench: Bench) -> None:
    """A block goes to the store and comes back in the place of another one."""
    bench.patch.setattr("engine.worker.process.kept_kv.open_store", Memory)
    model = make_checkpoint(bench.folder)
    worker = bench.load(model, kv_store="memory://here")
    prompt = (5, 6, 7, 8, 9)

    def run(number: int, start: int, blocks: Sequence[int], *moves: BlockMove) -> tuple[int, ...]:
        table = np.array(blocks, "<i4").tobytes()
        entry = StepEntry(RequestId(0), start, prompt[start:], table, SampleSpec(GREEDY))
        result = worker.run(Step(StepId(number), (entry,), moves))
        assert not result.unread
        return result.tokens

    expected = run(0, 0, (0, 1))
    out = worker.run(Step(StepId(1), (), (block_move(Direction.OUT, 0),)))
    assert not out.tokens
    assert run(2, 4, (3, 1), block_move(Direction.IN, 3)) == expected
    lost = block_move(Direction.IN, 4)._replace(hashes=bytes(HASH_BYTES))
    assert worker.run(Step(StepId(3), (), (lost,))).unread == (Page(PageKind.BLOCK, 4),)


def is_sharded(bench: Bench, stages: int, ranks: int) -> None:
    model = make_checkpoint(bench.folder)
    alone = Driver(load_worker(model), seed=1)
    with bench.shards(model, stages, ranks) as workers:
        together = Driver(workers, seed=1)
        for request, prompt in ((0, (5, 6, 7)), (1, (9,) * 11)):
            expected = alone.generate(request, prompt, 6)
            assert together.generate(request, prompt, 6) == expected


def reads_images(bench: Bench) -> None:
    """A picture and text beside each other, with lookahead; the tokens of Gemma's pictures attend
    to each other."""
    for variant in ("qwen3_vl", "gemma3"):
        model = make_vision_checkpoint(bench.folder / variant, variant)
        prompt = Prompt.of([5, 6, 92], picture(variant, 4, 6), [93, 7, 8])
        specs = [RequestSpec(prompt.tokens, 8, GREEDY, media=prompt.media), *SPECS[:2]]
        expected = [outcome.tokens for outcome in play(load_worker(model), specs)]
        outcomes = play(bench.load(model, lookahead=1), specs, lookahead=1, **LIMITS)
        assert [outcome.error for outcome in outcomes] == [None] * 3
        assert [outcome.tokens for outcome in outcomes] == expected


def has_replicas(bench: Bench) -> None:
    """Two replicas with a worker each serve all requests; one worker dies and comes back."""
    model = make_checkpoint(bench.folder)
    expected = texts(load_worker(model))
    workers = [bench.load(model) for _ in range(2)]
    report, settings = workers[0].report, SchedulerSettings(max_model_len=64, **LIMITS)
    executors, members = [Mortal(workers[0], (3,), 1), Mortal(workers[1], (), 1)], []
    for executor in executors:
        ledger = KVLedger(KVShape(report.num_blocks, report.block_size))
        delay = QueueDelay(HAND_COST, LIMITS["max_batch_size"])
        scheduler = IterationScheduler(settings, ledger, FirstComeFirstServed(), delay)
        members.append(Replica(Engine(scheduler, executor, time.perf_counter), delay))
    replicas = Replicas(members, time.perf_counter)

    async def serve() -> list[list[int]]:
        running = asyncio.create_task(replicas.run())
        outcomes = await asyncio.gather(*(read_all(replicas, spec) for spec in SPECS))
        running.cancel()
        return [outcome.tokens for outcome in outcomes]

    assert asyncio.run(serve()) == expected
    assert all(len(executor.steps) > 3 for executor in executors)


FEATURES: Mapping[str, Callable[[Bench], None]] = {
    "lookahead": looks_ahead,
    "speculation: n-gram, suffix, predicted outputs": speculates,
    "draft model": has_draft_model,
    "multi-token prediction": predicts_several_tokens,
    "recurrent layers": is_recurrent,
    "pooling": pools,
    "images": reads_images,
    "LoRA": has_loras,
    "weights in int8": lambda bench: is_quantized(bench, "int8"),
    "weights in int4": lambda bench: is_quantized(bench, "int4"),
    "weights in fp8": lambda bench: is_quantized(bench, "fp8"),
    "disk tier": keeps_on_disk,
    "shared store": keeps_in_a_store,
    "pipeline stages": lambda bench: is_sharded(bench, 2, 1),
    "tensor ranks": lambda bench: is_sharded(bench, 1, 2),
    "replicas": has_replicas,
}
# What a device rejects, with the beginning of its error.
REJECTED = {
    ("weights in fp8", "cpu"): "--weights 'fp8' is not supported on cpu",
}
DEVICES = ("cpu", "cuda")
NEED_TWO_GPUS = ("pipeline stages", "tensor ranks")


@pytest.mark.parametrize("device", [*DEVICES, on_gpu(FLOAT32)])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_works_on_a_device_or_its_error_names_it(
    feature: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stand-in for a GPU, and on a real one."""
    if device == FLOAT32 and feature in NEED_TWO_GPUS:
        pytest.skip("needs two GPUs")
    bench = Bench(device, tmp_path, monkeypatch)
    error = REJECTED.get((feature, device))
    if error is None:
        FEATURES[feature](bench)
        return
    with pytest.raises(StartupError, match=error):
        FEATURES[feature](bench)


def table() -> str:
    """The table of features and devices."""
    rows = ["| feature | CPU | GPU (stand-in) |", "|---|---|---|"]
    for feature in FEATURES:
        errors = [REJECTED.get((feature, device)) for device in DEVICES]
        cells = ["tested" if error is None else f"rejected: `{error}`" for error in errors]
        rows.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(rows)


def test_the_table_in_the_readme_says_the_same() -> None:
    assert table() in README.read_text(), table()
