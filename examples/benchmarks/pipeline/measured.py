"""A model with random weights in pipeline stages on this machine: its speed and its bubbles."""

import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import FinishReason, RequestSpec
from engine.step import SamplingParams
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.transport.trace import TraceFile
from engine.worker_settings import Kernels, KVSettings, WorkerSettings

Json = dict[str, Any]
CONFIG: Json = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """A number of stages; `depth` batches of `batch` requests are in flight."""

    name: str
    stages: int
    depth: int
    batch: int
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """Output tokens per second, and each stage's share of time without computation."""

    rate: float
    bubbles: tuple[float, ...]


def write_checkpoint(directory: Path) -> Path:
    """About 55 million random parameters, float32."""
    hidden, inner, vocab, kv = 512, 1536, 4096, 256
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.02

    tensors = {
        "model.embed_tokens.weight": noise(vocab, hidden),
        "lm_head.weight": noise(vocab, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{name}.weight": noise(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(hidden)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def counting(seconds: float) -> int:
    """How far one process counts in `seconds`."""
    ends, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < ends:
        count += 1
    return count


def cores_free() -> float:
    """The count of two processes divided by that of one: 2 on two idle cores."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        list(processes.map(counting, [0.1, 0.1]))  # both have started
        alone = processes.submit(counting, 2.0).result()
        return sum(processes.map(counting, [2.0, 2.0])) / alone


class Bench:
    """A setup with loaded workers, idle between its runs, so that several setups can alternate."""

    def __init__(self, setup: Setup, model: Path, trace_path: Path) -> None:
        self.setup = setup
        self._path = trace_path
        self._trace = TraceFile(trace_path)
        self._windows: list[tuple[float, float, float]] = []  # began, ended, tokens per second
        self._executor = MultiprocessExecutor(
            WorkerSettings(
                str(model), kv=KVSettings(kv_slots=16384), kernels=Kernels(threads=setup.threads)
            ),
            MultiprocessSettings(num_stages=setup.stages, depth=setup.depth),
            trace=self._trace,
        )

    async def open(self) -> None:
        report = await self._executor.start(lambda what, done, total: None)
        bounds = SchedulerSettings(
            report.max_model_len, max_batch_size=self.setup.batch, reuses_prefixes=False
        )
        ledger = KVLedger(KVShape(report.num_blocks, report.block_size))
        scheduler = IterationScheduler(bounds, ledger, FirstComeFirstServed())
        self._engine = Engine(scheduler, self._executor, time.perf_counter)
        self._running = asyncio.create_task(self._engine.run())

    async def run(self, specs: Sequence[RequestSpec]) -> float:
        """The tokens per second of requests that all arrive at once, until the last one ends."""
        began = time.monotonic()
        counts = await asyncio.gather(*(read(self._engine, spec) for spec in specs))
        ended = time.monotonic()
        rate = sum(counts) / (ended - began)
        self._windows.append((began, ended, rate))
        return rate

    async def close(self) -> list[Run]:
        """Stop the workers; returns the runs."""
        self._running.cancel()
        await self._executor.close()
        self._trace.close()
        origin = self._trace.origin
        return [
            Run(rate, self._bubbles((began - origin) * 1e6, (ended - origin) * 1e6))
            for began, ended, rate in self._windows
        ]

    def _bubbles(self, began: float, ended: float) -> tuple[float, ...]:
        """Per stage, the share without computation of a window in the trace's microseconds."""
        events = json.loads(self._path.read_text())
        runs = [one for one in events if one["ph"] == "X" and began <= one["ts"] <= ended]
        return tuple(
            1 - sum(one["dur"] for one in runs if one["pid"] == 1 + stage) / (ended - began)
            for stage in range(self.setup.stages)
        )


async def read(engine: Engine, spec: RequestSpec) -> int:
    """Read one output; returns its number of tokens."""
    count = 0
    with engine.stream(spec) as stream:
        finish: FinishReason | None = None
        while finish is None:
            chunk = await stream.next()
            count += len(chunk.tokens)
            finish = chunk.finish
    return count


def make_specs(count: int, output_len: int) -> list[RequestSpec]:
    rng = Random(0)
    return [
        RequestSpec(
            tuple(rng.choices(range(4096), k=32)), output_len, SamplingParams(temperature=0)
        )
        for _ in range(count)
    ]
