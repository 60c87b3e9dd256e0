"""Random weights in the shape of the built-in model, and an engine that runs a list of requests."""

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

import adapters
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import EngineError
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import FinishReason, RequestSpec
from engine.worker.process.worker import Worker
from engine.worker_settings import KVSettings, WorkerSettings
from tests.inline_executor import InlineExecutor

BUILTIN = Path(adapters.__file__).parent / "builtin"


class Output(NamedTuple):
    """The tokens of one request, and how it ended."""

    tokens: list[int]
    finish: FinishReason | None
    error: EngineError | None


def random_worker(directory: Path, seed: int = 0) -> Worker:
    """A worker with random weights in the shape of the built-in model, saved in `directory`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(BUILTIN / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() > 1:  # norms stay as they are
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, directory / "model.safetensors")
    for file in BUILTIN.glob("*.json"):
        shutil.copy(file, directory)
    return Worker.load(
        WorkerSettings(str(directory), kv=KVSettings(kv_slots=65536)), lambda *_: None
    )


def serve(worker: Worker, specs: Sequence[RequestSpec]) -> list[Output]:
    """The outputs of all requests, which run at the same time."""
    report = worker.report
    scheduler = IterationScheduler(
        SchedulerSettings(report.max_model_len, max_queue_requests=len(specs) + 1),
        KVLedger(KVShape(report.num_blocks, report.block_size)),
        FirstComeFirstServed(),
    )
    return asyncio.run(_serve(Engine(scheduler, InlineExecutor(worker), time.perf_counter), specs))


async def _serve(engine: Engine, specs: Sequence[RequestSpec]) -> list[Output]:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        outputs = await asyncio.gather(*(_read(engine, spec) for spec in specs))
        running.cancel()
    return outputs


async def _read(engine: Engine, spec: RequestSpec) -> Output:
    tokens: list[int] = []
    with engine.stream(spec) as stream:
        while stream.request.finish is None:
            try:
                tokens += (await stream.next()).tokens
            except EngineError as error:
                return Output(tokens, None, error)
    return Output(tokens, stream.request.finish, None)
