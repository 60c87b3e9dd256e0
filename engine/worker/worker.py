"""One worker: a checkpoint's layers, their KV and the sampler, behind `load` and `run`."""

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from engine.errors import RefusedToStart
from engine.step import (
    Draw,
    Fault,
    RequestId,
    Sampling,
    Step,
    StepEntry,
    StepId,
    StepResult,
    WorkerReport,
    WorkerSettings,
)
from engine.worker.kv_tensors import allocate, available_bytes, bytes_per_block, choose_num_blocks
from engine.worker.layout import LayoutLimits, build_layout
from engine.worker.native.build import compile_all
from engine.worker.native.operators import NativeOperators
from engine.worker.native.team import Team
from engine.worker.operators import TorchOperators
from engine.worker.ports import (
    AttentionSpec,
    MakesAttention,
    ModelFamily,
    ModelShape,
    Operators,
    ReadsFamily,
)
from engine.worker.reading import Reader, Reading
from engine.worker.sampler import Sampler
from engine.worker.stage import Stage
from engine.worker.weights import Weights

Progress = Callable[[str, int, int], None]

DTYPES = {"auto": torch.float32, "float32": torch.float32}
DEVICES = ("auto", "cpu")
DEFAULT_ATTENTION = "cpu"
PLAIN_ATTENTION = "reference"  # and with it, plain torch throughout


def load_by_name(path: str) -> object:
    """What `"module:name"`, an entry of an adapter's table, stands for."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def _load_from(table_path: str, what: str, name: str) -> object:
    table = cast(Mapping[str, str], load_by_name(table_path))
    if name not in table:
        raise RefusedToStart(f"{what} {name!r} is not supported; known: {', '.join(table)}")
    return load_by_name(table[name])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory, its config, and the family that reads it."""

    directory: Path
    architecture: str
    family: ModelFamily
    end_ids: tuple[int, ...]

    @classmethod
    def open(cls, model: str) -> "Checkpoint":
        """Find a directory or hub id; raises `RefusedToStart`."""
        resolve = cast(
            Callable[[str], Path], load_by_name("adapters.models.checkpoint:resolve_checkpoint")
        )
        read_config = cast(
            Callable[[Path], dict[str, object]],
            load_by_name("adapters.models.checkpoint:read_config"),
        )
        end_token_ids = cast(
            Callable[[Path], tuple[int, ...]],
            load_by_name("adapters.models.checkpoint:end_token_ids"),
        )
        directory = resolve(model)
        config = read_config(directory)
        names = config.get("architectures")
        if not isinstance(names, list) or len(names) != 1:
            raise RefusedToStart(f"config.json: architectures is {names!r}, expected one name")
        if config.get("quantization_config") is not None:
            raise RefusedToStart("config.json: quantization_config is not supported")
        reads = _load_from("adapters.models:FAMILIES", "architecture", str(names[0]))
        family = cast(ReadsFamily, reads)(config)
        return cls(directory, str(names[0]), family, end_token_ids(directory))


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


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker:
    """Holds all layers of a model and runs steps on them, one at a time."""

    def __init__(
        self,
        stage: Stage,
        sampler: Sampler,
        team: Team,
        limits: LayoutLimits,
        report: WorkerReport,
    ) -> None:
        self.report = report
        self._stage = stage
        self._reader = Reader(stage.model.logits, sampler)
        self._team = team
        self._limits = limits

    @classmethod
    def load(cls, settings: WorkerSettings, progress: Progress) -> "Worker":
        """Read the checkpoint, make room for KV, run once to warm up.

        `progress` hears (what, done, total). Raises `RefusedToStart` with one readable line.
        """
        dtype = _dtype(settings)
        checkpoint = Checkpoint.open(settings.model)
        shape = checkpoint.family.shape
        max_model_len = _context(settings, shape)
        attention_name = DEFAULT_ATTENTION if settings.attention == "auto" else settings.attention
        backend = cast(
            MakesAttention,
            _load_from("adapters.attention:BACKENDS", "attention", attention_name),
        )

        threads = settings.threads or _num_cores()
        team = Team(threads)
        is_plain = attention_name == PLAIN_ATTENTION
        torch.set_num_threads(threads if is_plain else 1)
        if not is_plain:
            compile_all(progress)
        operators: Operators = TorchOperators() if is_plain else NativeOperators(team)
        weights = Weights(checkpoint.directory, dtype, progress)
        model = checkpoint.family.build(weights, range(shape.num_layers), operators)
        weights.check_all_taken(checkpoint.family.ignored_weights)

        size = settings.block_size
        block_bytes = bytes_per_block(shape, shape.num_layers, size, dtype.itemsize)
        num_blocks = choose_num_blocks(settings, block_bytes, max_model_len, available_bytes())
        cache = allocate(shape, shape.num_layers, num_blocks, size, dtype)
        spec = AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            window=shape.window,
        )
        worker = cls(
            Stage(model, backend(spec, cache, team)),
            Sampler(shape.vocab_size, operators),
            team,
            LayoutLimits(shape.vocab_size, max_model_len, num_blocks, size),
            WorkerReport(
                architecture=checkpoint.architecture,
                num_parameters=weights.num_parameters,
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
            ),
        )
        if faults := worker._warm_up():
            raise RefusedToStart(f"{settings.model} cannot be served: {faults[0].line}")
        return worker

    def run(self, step: Step) -> StepResult:
        """Compute one step. Whatever it raises, the next step can run."""
        started = time.perf_counter()
        layout = build_layout(step, self._limits)
        reading = Reading()
        with torch.inference_mode(), self._team.awake():
            if len(layout.sampled_rows) or len(layout.scored_rows):
                reading = self._reader.read(step, layout, self._stage.read(layout))
            else:
                self._stage.run(layout)
        return StepResult(
            step_id=step.step_id,
            seconds=time.perf_counter() - started,
            **reading._asdict(),
        )

    def logits(self, step: Step) -> Tensor:
        """Compute one step but draw nothing: `[entries with a draw, vocab]` in float32."""
        layout = build_layout(step, self._limits)
        with torch.inference_mode(), self._team.awake():
            return self._stage.logits(layout)

    def _warm_up(self) -> list[Fault]:
        """Run a piece of a prompt and a decode in block 0, which nobody owns yet."""
        faults: list[Fault] = []
        size = min(self._limits.block_size, self._limits.max_positions)
        block = bytes(4)
        for start, count in ((0, max(1, size - 1)), (size - 1, 1)):
            entry = StepEntry(RequestId(0), start, (0,) * count, block, Draw(Sampling()))
            faults += self.run(Step(StepId(0), (entry,))).faults
        return faults
