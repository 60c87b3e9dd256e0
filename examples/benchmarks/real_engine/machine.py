"""A small model with random weights, a worker that runs it, and its measured cost model."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

import adapters
from engine.control.event_recorder import RecordingHeader
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.cost.profiler import ProbeLimits
from engine.kv_shape import KVShape
from engine.policy import PolicySettings
from engine.simulated.virtual_loop import run_virtual
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.worker.process.worker import Worker
from engine.worker_settings import Kernels, KVSettings, WorkerReport, WorkerSettings
from examples.benchmarks.real_engine.counted import CountedExecutor
from gateway.serve.cost.calibration import measured, processor

BUILTIN = Path(adapters.__file__).parent / "builtin"
CONTEXT = 4096
BATCH_SIZE, BATCH_TOKENS = 8, 256


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a Llama; its vocabulary is the built-in model's."""

    hidden: int = 512
    layers: int = 6
    feed_forward: int = 1408
    head_dim: int = 64


LARGE = Size()  # 19 M parameters: a step takes some milliseconds
MEDIUM = Size(hidden=320, layers=6, feed_forward=864, head_dim=32)  # a step takes about 2 ms
TINY = Size(hidden=64, layers=2, feed_forward=128, head_dim=16)  # for tests
SIZES = {"tiny": TINY, "medium": MEDIUM, "large": LARGE}


def make_model(directory: Path, size: Size) -> Path:
    """Write a checkpoint with random weights, which `podway serve` can load."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(BUILTIN / name, directory)
    config = json.loads((BUILTIN / "config.json").read_text())
    heads = size.hidden // size.head_dim
    config |= {
        "hidden_size": size.hidden,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": size.head_dim,
        "max_position_embeddings": CONTEXT,
    }
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    save_file(_weights(size, config["vocab_size"], heads), directory / "model.safetensors")
    return directory


def _weights(size: Size, vocabulary: int, heads: int) -> dict[str, torch.Tensor]:
    wide, narrow = heads * size.head_dim, max(1, heads // 2) * size.head_dim
    shapes = {
        "self_attn.q_proj": (wide, size.hidden),
        "self_attn.k_proj": (narrow, size.hidden),
        "self_attn.v_proj": (narrow, size.hidden),
        "self_attn.o_proj": (size.hidden, wide),
        "mlp.gate_proj": (size.feed_forward, size.hidden),
        "mlp.up_proj": (size.feed_forward, size.hidden),
        "mlp.down_proj": (size.hidden, size.feed_forward),
    }
    weights = {
        "model.embed_tokens.weight": 0.05 * torch.randn(vocabulary, size.hidden),
        "model.norm.weight": torch.ones(size.hidden),
    }
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = torch.randn(shape) * shape[1] ** -0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(size.hidden)
    return weights


@dataclass(frozen=True, slots=True)
class Machine:
    """A loaded worker, and the cost model that was measured before the first run."""

    executor: MultiprocessExecutor | CountedExecutor
    report: WorkerReport
    cost: CostModel
    settings: WorkerSettings

    @property
    def is_counted(self) -> bool:
        """Whether seconds are CPU seconds, on a virtual event loop."""
        return isinstance(self.executor, CountedExecutor)

    async def twin(self) -> "Machine":
        """The same with a worker of its own in this process, to run beside this one in turns."""
        worker = await asyncio.to_thread(Worker.load, self.settings, _silent)
        return replace(self, executor=CountedExecutor(worker))

    async def measured(self) -> CostModel:
        """A cost model measured now."""
        return await profile(self.executor, self.report)

    def header(
        self, policy: str, cost: CostModel | None = None, **bounds: object
    ) -> RecordingHeader:
        """Policy, scheduler settings and cost model of a run; `bounds` override the settings."""
        values: dict[str, object] = {
            "max_model_len": CONTEXT,
            "max_batch_size": BATCH_SIZE,
            "max_batch_tokens": BATCH_TOKENS,
            "max_queue_requests": 100_000,
            "max_queue_tokens": 1 << 40,
        }
        settings = SchedulerSettings(**(values | bounds))  # type: ignore[arg-type]
        return RecordingHeader(
            policy=policy,
            policies=PolicySettings(seats=settings.max_batch_size, starvation_seconds=60.0),
            scheduler=settings,
            kv=KVShape(self.report.num_blocks, self.report.block_size),
            depth=1,
            cost=cost or self.cost,
        )


@asynccontextmanager
async def machine(
    model: Path, threads: int, is_counted: bool, kv_slots: int = 32_768
) -> AsyncIterator[Machine]:
    """A worker with the model, measured once: a process, or in this one to count CPU seconds."""
    settings = WorkerSettings(
        str(model),
        max_batch_tokens=BATCH_TOKENS,
        kv=KVSettings(kv_slots=kv_slots),
        kernels=Kernels(threads=threads),
    )
    executor: MultiprocessExecutor | CountedExecutor
    if is_counted:
        worker = await asyncio.to_thread(Worker.load, settings, _silent)
        executor, report = CountedExecutor(worker), worker.report
    else:
        executor = MultiprocessExecutor(settings, MultiprocessSettings())
        report = await executor.start(_silent)
    try:
        yield Machine(executor, report, await profile(executor, report), settings)
    finally:
        await executor.close()


def _silent(what: str, done: int, total: int) -> None:
    """Print no progress."""


async def profile(
    executor: MultiprocessExecutor | CountedExecutor, report: WorkerReport
) -> CostModel:
    """The cost model that `podway serve` would measure before it is ready."""
    bounds = ProbeLimits(BATCH_SIZE, BATCH_TOKENS, CONTEXT, report.num_blocks, report.block_size)
    if not isinstance(executor, CountedExecutor):
        return (await measured(executor, bounds, time.perf_counter)).model

    async def counted() -> CostModel:
        clock = asyncio.get_running_loop().time
        return (await measured(executor, bounds, clock)).model

    return await asyncio.to_thread(lambda: run_virtual(counted()))


def circumstances() -> str:
    """CPU, cores and load of this machine, for a report."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores of an {processor()}, load average {load:.1f}"


def clock_of(is_counted: bool) -> str:
    """The unit of the seconds in a report."""
    if not is_counted:
        return "Seconds are wall-clock seconds of a worker process."
    return (
        "Other processes used the machine, so seconds are CPU seconds of worker and event loop, "
        "which ran in one process (`--clock cpu`; see `real_engine/counted.py`)."
    )
