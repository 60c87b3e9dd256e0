"""Random weights in the shape of the built-in model, and an engine that serves a list of asks."""

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

import adapters
from engine.control.scheduler import IterationScheduler, SchedulerSettings
from engine.errors import EngineError
from engine.kv.ledger import KVLedger
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import FinishReason, RequestSpec
from engine.step import WorkerSettings
from engine.transport.inline import InlineExecutor
from engine.worker.process.worker import Worker

BUILTIN = Path(adapters.__file__).parent / "builtin"


class Said(NamedTuple):
    """One output: its tokens, and how it ended."""

    tokens: list[int]
    finish: FinishReason | None
    error: EngineError | None


def random_worker(directory: Path, seed: int = 0) -> Worker:
    """A worker with random weights, written into `directory`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(BUILTIN / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() > 1:  # norms stay as they are
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, directory / "model.safetensors")
    for file in BUILTIN.glob("*.json"):
        shutil.copy(file, directory)
    return Worker.load(WorkerSettings(str(directory), kv_slots=65536), lambda *_: None)


def serve(worker: Worker, asks: Sequence[RequestSpec]) -> list[Said]:
    """All asks at once, to their end."""
    report = worker.report
    scheduler = IterationScheduler(
        SchedulerSettings(report.max_model_len, max_queue_requests=len(asks) + 1),
        KVLedger(report.num_blocks, report.block_size),
        FirstComeFirstServed(),
    )
    return asyncio.run(_serve(Engine(scheduler, InlineExecutor(worker), time.perf_counter), asks))


async def _serve(engine: Engine, asks: Sequence[RequestSpec]) -> list[Said]:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        said = await asyncio.gather(*(_listen(engine, ask) for ask in asks))
        running.cancel()
    return said


async def _listen(engine: Engine, ask: RequestSpec) -> Said:
    tokens: list[int] = []
    with engine.stream(ask) as stream:
        while stream.request.finish is None:
            try:
                tokens += (await stream.next()).tokens
            except EngineError as error:
                return Said(tokens, None, error)
    return Said(tokens, stream.request.finish, None)
