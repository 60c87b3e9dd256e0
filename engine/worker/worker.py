"""One worker: a checkpoint's layers, their KV and the sampler, behind `load` and `run`."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.errors import RefusedToStart, StepFailed, WorkerLost
from engine.step import (
    Draw,
    Fault,
    Placement,
    RequestId,
    Sampling,
    Step,
    StepEntry,
    StepId,
    StepResult,
    StepTimes,
    WorkerReport,
    WorkerSettings,
)
from engine.worker.checkpoint import Checkpoint, load_from_table
from engine.worker.constraints import Constraints, Wanted
from engine.worker.held import HeldTokens
from engine.worker.host_pool import HostPool, choose_num_host_blocks
from engine.worker.inbox import Inbox
from engine.worker.kv_tensors import allocate, available_bytes, bytes_per_block, choose_num_blocks
from engine.worker.layout import LayoutLimits, RaggedLayout, build_layout
from engine.worker.native.build import compile_all
from engine.worker.native.int8 import Int8Operators
from engine.worker.native.operators import NativeOperators
from engine.worker.native.team import Team
from engine.worker.operators import TorchOperators
from engine.worker.plane import Handed, Plane
from engine.worker.ports import (
    AttentionSpec,
    MakesAttention,
    ModelShape,
    MovesBlocks,
    Operators,
)
from engine.worker.reading import Reader, Reading
from engine.worker.sampler import Sampler
from engine.worker.shard import Shard
from engine.worker.stage import Stage
from engine.worker.weights import Weights

Progress = Callable[[str, int, int], None]

DTYPES = {"auto": torch.float32, "float32": torch.float32}
DEVICES = ("auto", "cpu")
WEIGHTS = {"auto": NativeOperators, "float32": NativeOperators, "int8": Int8Operators}
DEFAULT_ATTENTION = "cpu"
PLAIN_ATTENTION = "reference"  # and with it, plain torch throughout


def _context(settings: WorkerSettings, shape: ModelShape) -> int:
    if settings.max_model_len > shape.max_positions:
        raise RefusedToStart(
            f"max_model_len={settings.max_model_len} is beyond the checkpoint's "
            f"{shape.max_positions} positions"
        )
    return settings.max_model_len or shape.max_positions


def _dtype(settings: WorkerSettings) -> torch.dtype:
    if settings.device not in DEVICES:
        raise RefusedToStart(f"device {settings.device!r} is not supported; known: cpu")
    if settings.dtype not in DTYPES:
        raise RefusedToStart(f"dtype {settings.dtype!r} is not supported on cpu; known: float32")
    return DTYPES[settings.dtype]


def _operators(settings: WorkerSettings, team: Team, *, is_plain: bool) -> Operators:
    if settings.weights not in WEIGHTS:
        known = ", ".join(WEIGHTS)
        raise RefusedToStart(f"weights {settings.weights!r} is not supported; known: {known}")
    if not is_plain:
        return WEIGHTS[settings.weights](team)
    if settings.weights == "int8":
        raise RefusedToStart(f"weights='int8' needs another attention than {PLAIN_ATTENTION!r}")
    return TorchOperators()


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _take_place(shape: ModelShape, placement: Placement) -> tuple[Shard, Plane | None]:
    """This worker's shard, and its end of the data plane unless it is alone."""
    shard = Shard.of(shape, placement, None)
    if placement.num_workers == 1:
        return shard, None
    plane = Plane.join(placement)
    return replace(shard, add_up=plane.add_up if placement.num_ranks > 1 else None), plane


def _gathering(shard: Shard, plane: Plane | None) -> Callable[[Tensor], Tensor | None] | None:
    """What makes whole logits of the ranks' parts; None where they are whole."""
    if plane is None or shard.num_ranks == 1:
        return None
    ranks = (replace(shard, rank=rank) for rank in range(shard.num_ranks))
    return partial(plane.gather, widths=[len(other.vocabulary.run) for other in ranks])


def _num_blocks(settings: WorkerSettings, own_bytes: int, context: int) -> tuple[int, int]:
    """How many blocks of `own_bytes` this worker has room for, on device and host."""
    available = available_bytes()
    num_blocks = choose_num_blocks(settings, own_bytes, context, available)
    left = available - num_blocks * own_bytes
    return num_blocks, choose_num_host_blocks(settings, own_bytes, left)


def _share(settings: WorkerSettings, whole_bytes: int, own_bytes: int) -> WorkerSettings:
    """What this worker is to take of the bytes that are for all workers together."""
    kv, host = settings.kv_bytes, settings.host_kv_bytes
    return replace(
        settings,
        kv_bytes=max(1, kv * own_bytes // whole_bytes) if kv else 0,
        host_kv_bytes=max(1, host * own_bytes // whole_bytes) if host else 0,
    )


class Prepared(NamedTuple):
    """A step as far as it gets without computing."""

    layout: RaggedLayout
    handed: Handed | None  # None on the first stage


class Worker:
    """Holds a shard of a model and runs steps on it, one at a time."""

    def __init__(
        self,
        stage: Stage,
        sampler: Sampler,
        constraints: Constraints,
        mover: MovesBlocks,
        team: Team,
        limits: LayoutLimits,
        report: WorkerReport,
        shard: Shard,
        plane: Plane | None = None,
    ) -> None:
        self.report = report
        self._stage = stage
        self._reader = Reader(stage.head, sampler, constraints)
        self._mover = mover
        self._team = team
        self._limits = limits
        self._held = HeldTokens(num_steps=1)
        self._shard = shard
        self._plane = plane  # None for a worker that is alone
        self._inbox = Inbox(self._prepare)
        self._owes = False  # the next stage the step that runs
        self._is_amid = False  # in a step, where ranks wait for each other
        self.times = StepTimes(None, 0.0, 0.0)  # of the step run last

    @classmethod
    def load(cls, settings: WorkerSettings, progress: Progress) -> "Worker":
        """Read the checkpoint, make room for KV, run once to warm up.

        `progress` hears (what, done, total). Raises `RefusedToStart` with one readable line.
        """
        dtype = _dtype(settings)
        checkpoint = Checkpoint.open(settings.model)
        shape, placement = checkpoint.family.shape, settings.placement
        max_model_len = _context(settings, shape)
        attention_name = DEFAULT_ATTENTION if settings.attention == "auto" else settings.attention
        backend = cast(
            MakesAttention,
            load_from_table("adapters.attention:BACKENDS", "attention", attention_name),
        )
        shard, plane = _take_place(shape, placement)

        threads = settings.threads or max(1, _num_cores() // placement.num_neighbours)
        team = Team(threads)
        is_plain = attention_name == PLAIN_ATTENTION
        torch.set_num_threads(threads if is_plain else 1)
        if not is_plain:
            compile_all(progress)
        operators = _operators(settings, team, is_plain=is_plain)
        weights = Weights(checkpoint.directory, dtype, progress)
        num_parameters = checkpoint.survey(weights, shard)
        model = checkpoint.family.build(weights, shard, operators)
        weights.drop_pages()

        size, local = settings.block_size, shard.local_shape
        block_bytes = bytes_per_block(local, local.num_layers, size, dtype.itemsize)
        whole_bytes = bytes_per_block(shape, shape.num_layers, size, dtype.itemsize)
        share = _share(settings, whole_bytes, block_bytes)
        num_blocks, num_host_blocks = _num_blocks(share, block_bytes, max_model_len)
        if plane is not None:
            num_blocks = plane.least("blocks", num_blocks)
            num_host_blocks = plane.least("host blocks", num_host_blocks)
        cache = allocate(local, local.num_layers, num_blocks, size, dtype)
        host = allocate(local, local.num_layers, num_host_blocks, size, dtype)
        spec = AttentionSpec(
            num_heads=local.num_heads,
            num_kv_heads=local.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            window=shape.window,
        )
        worker = cls(
            Stage(model, backend(spec, cache, team), _gathering(shard, plane)),
            Sampler(shape.vocab_size, operators),
            Constraints(checkpoint.open_grammars),
            HostPool(cache, host),
            team,
            LayoutLimits(shape.vocab_size, max_model_len, num_blocks, size),
            WorkerReport(
                architecture=checkpoint.architecture,
                num_parameters=num_parameters,
                dtype=str(dtype).removeprefix("torch."),
                device="cpu",
                attention=attention_name,
                vocab_size=shape.vocab_size,
                max_model_len=max_model_len,
                eos_token_ids=checkpoint.end_ids,
                num_blocks=num_blocks,
                block_size=size,
                bytes_per_block=block_bytes,
                threads=threads,
                weights="int8" if settings.weights == "int8" else "float32",
                num_host_blocks=num_host_blocks,
            ),
            shard,
            plane,
        )
        if faults := worker._warm_up():
            raise RefusedToStart(f"{settings.model} cannot be served: {faults[0].line}")
        return worker

    def learn(self, step: Step) -> None:
        """Hear of a step before it is run; another thread than the one that runs may call this."""
        if not self._shard.is_first:
            self._inbox.put(step)

    def run(self, step: Step) -> StepResult:
        """Compute one step. Whatever it raises but `WorkerLost`, the next step can run.

        Tokens come from rank 0 of the last stage only; `seconds` are those of all stages so far.
        """
        self._held.open(step)
        prepared = self._take(step)
        step = self._held.complete(step, prepared.layout)
        with torch.inference_mode(), self._team.awake(), self._mover.moving(step.moves):
            wanted = self._reader.begin(step) if self._draws else Wanted()
            hidden = self._compute(step, prepared)
            reading = Reading()
            if hidden is not None:
                reading = self._read(step, prepared.layout, hidden, wanted)
        self._held.keep(step, reading.tokens, reading.faults)
        seconds = self._seconds(prepared)
        self.times = self.times._replace(ended_at=time.monotonic())
        return StepResult(step_id=step.step_id, seconds=seconds, **reading._asdict())

    def logits(self, step: Step) -> Tensor | None:
        """Compute one step but draw nothing: `[entries with a draw, vocab]` in float32.

        None but on rank 0 of the last stage.
        """
        prepared = self._take(step)
        with torch.inference_mode(), self._team.awake():
            hidden = self._compute(step, prepared)
            if hidden is None:
                return None
            return self._stage.head(hidden[: len(prepared.layout.sampled_rows)])

    def abandon(self, step: Step, line: str) -> None:
        """After `run` raised: tell the next stage, if it waits for the step, why it failed.

        Raises `WorkerLost` where other ranks of this stage may still wait for this one.
        """
        if self._is_amid and self._shard.num_ranks > 1:
            raise WorkerLost(f"it left its stage in the middle of step {step.step_id}: {line}")
        self._is_amid = False
        if self._owes:
            nothing = torch.zeros(step.num_tokens, self._shard.shape.hidden_size)
            self._hand_on(step.step_id, nothing, 0.0, line)

    def _prepare(self, step: Step) -> Prepared:
        """What needs no computing: the layout, and the wait for the stage before."""
        layout = build_layout(step, self._limits)
        if self._shard.is_first:
            return Prepared(layout, None)
        assert self._plane is not None, "a stage that stands alone"
        hidden_size = self._shard.shape.hidden_size
        return Prepared(layout, self._plane.receive(step.step_id, layout.num_tokens, hidden_size))

    def _take(self, step: Step) -> Prepared:
        """The step prepared; from here on the next stage counts on it."""
        self._owes = False
        prepared = self._inbox.take(step)
        self._owes = not self._shard.is_last
        self._is_amid = True
        data_at, now = prepared.handed and prepared.handed.at, time.monotonic()
        self.times = StepTimes(data_at, now, now)
        return prepared

    def _compute(self, step: Step, prepared: Prepared) -> Tensor | None:
        """On the last stage, the hidden states to read from; elsewhere they are handed on."""
        layout, handed = prepared
        if handed is not None and handed.fault:
            raise StepFailed(handed.fault)
        hidden = None if handed is None else handed.hidden
        if self._shard.is_last:
            hidden = self._stage.read(layout, hidden)
        else:
            hidden = self._stage.run(layout, hidden)
            self._hand_on(step.step_id, hidden, self._seconds(prepared))
            hidden = None
        self._is_amid = False
        return hidden

    def _hand_on(self, step_id: StepId, hidden: Tensor, seconds: float, fault: str = "") -> None:
        assert self._plane is not None, "a stage that stands alone"
        self._plane.send(step_id, hidden, seconds, fault)
        self._owes = False

    def _seconds(self, prepared: Prepared) -> float:
        """Spent on a step by all stages up to now."""
        before = 0.0 if prepared.handed is None else prepared.handed.seconds
        return before + time.monotonic() - self.times.began_at

    @property
    def _draws(self) -> bool:
        """Whether tokens come from this worker."""
        return self._shard.is_last and self._shard.rank == 0

    def _read(self, step: Step, layout: RaggedLayout, hidden: Tensor, wanted: Wanted) -> Reading:
        """What rank 0 of the last stage answers; the others help with the logits."""
        if self._shard.rank == 0:
            self._is_amid = len(layout.scored_rows) > 0  # then others wait for more than one head
            reading = self._reader.read(step, layout, hidden, wanted)
            self._is_amid = False
            return reading
        self._reader.follow(layout, hidden)
        return Reading()

    def _warm_up(self) -> list[Fault]:
        """Run a piece of a prompt and a decode in block 0, which nobody owns yet."""
        faults: list[Fault] = []
        size = min(self._limits.block_size, self._limits.max_positions)
        block = bytes(4)
        for start, count in ((0, max(1, size - 1)), (size - 1, 1)):
            entry = StepEntry(RequestId(0), start, (0,) * count, block, Draw(Sampling()))
            faults += self.run(Step(StepId(0), (entry,))).faults
        return faults
