"""Putting a worker together: its share of the weights, room for KV, threads, the data plane."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from engine.errors import RefusedToStart
from engine.step import Placement, WorkerReport, WorkerSettings
from engine.worker.checkpoint import Checkpoint, load_from_table
from engine.worker.constraints import Constraints
from engine.worker.host_pool import HostPool, choose_num_host_blocks
from engine.worker.kv_tensors import allocate, available_bytes, bytes_per_block, choose_num_blocks
from engine.worker.layout import LayoutLimits
from engine.worker.native.build import compile_all
from engine.worker.native.int8 import Int8Operators
from engine.worker.native.operators import NativeOperators
from engine.worker.native.team import Team
from engine.worker.operators import TorchOperators
from engine.worker.plane import Plane
from engine.worker.ports import (
    AttentionSpec,
    MakesAttention,
    ModelShape,
    MovesBlocks,
    Operators,
)
from engine.worker.sampler import Sampler
from engine.worker.shard import Shard
from engine.worker.stage import Stage

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


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker is made of; it is alone if it has no `plane`."""

    stage: Stage
    sampler: Sampler
    constraints: Constraints
    mover: MovesBlocks
    team: Team
    limits: LayoutLimits
    report: WorkerReport
    placement: Placement
    shard: Shard
    plane: Plane | None
    lookahead: int


def make_parts(settings: WorkerSettings, progress: Progress) -> Parts:
    """Read the checkpoint, join the other workers, make room for KV.

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
    constraints = Constraints(checkpoint.open_grammars)
    if shard.is_last and shard.rank == 0:
        constraints.open()

    threads = settings.threads or max(1, _num_cores() // placement.num_neighbours)
    team = Team(threads)
    is_plain = attention_name == PLAIN_ATTENTION
    torch.set_num_threads(threads if is_plain else 1)
    if not is_plain:
        compile_all(progress)
    operators = _operators(settings, team, is_plain=is_plain)
    weights = checkpoint.open_weights(dtype, progress)
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
    return Parts(
        stage=Stage(model, backend(spec, cache, team), _gathering(shard, plane)),
        sampler=Sampler(shape.vocab_size, operators),
        constraints=constraints,
        mover=HostPool(cache, host),
        team=team,
        limits=LayoutLimits(shape.vocab_size, max_model_len, num_blocks, size),
        report=WorkerReport(
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
        placement=placement,
        shard=shard,
        plane=plane,
        lookahead=settings.lookahead,
    )
