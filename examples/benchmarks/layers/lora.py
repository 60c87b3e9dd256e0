"""Steps with rows of LoRA adapters beside steps of the base model, in one worker.

Each kind of step computes the same number of rows: `plain` in a worker without adapters, `base`
without adapters in a worker that has four, `mixed` with the base model and four adapters in turn,
`one` with one adapter only. `merged` is what five models with merged weights would take, one after
the other: five steps with a fifth of the rows each. Kinds alternate; medians of CPU seconds, which
other processes on the machine disturb less than elapsed time.

    python -m examples.benchmarks.layers.lora [--shape M110] [--weights int8] [--json FILE]
"""

import argparse
import json
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from engine.lora import LoraSpec
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.worker.process.worker import Worker
from engine.worker_settings import Kernels, KVSettings, WorkerSettings

NUM_LORAS = 4
RANK = 16
CONTEXT = 128  # tokens of each request
PROMPT = 256  # tokens of the measured prompt
GREEDY = SampleSpec(SamplingParams(temperature=0.0))
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="M110", help="of random weights")
    parser.add_argument("--weights", nargs="+", default=["int8", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[5, 20, 40], help="of a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def make_lora(folder: Path, sizes: dict[str, tuple[int, int]], seed: int) -> Path:
    """A random adapter of all linears, in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in sizes.items():
        for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            name = f"base_model.model.{module}.lora_{factor}.weight"
            tensors[name] = 0.02 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def sizes_of(worker: Worker) -> dict[str, tuple[int, int]]:
    return {part.module: part.sizes for linear in worker.lora_linears for part in linear.parts}


@dataclass
class Steps:
    """Runs steps of one worker; each request has its own KV blocks."""

    worker: Worker
    number: int = 0

    def run(self, tokens: int, loras: list[int], start: int = 0) -> float:
        """CPU seconds of a step with so many tokens of each request."""
        size = self.worker.report.block_size
        each = -(-(start + tokens) // size)
        entries = tuple(
            StepEntry(
                RequestId(i),
                start,
                tuple(range(5, 5 + tokens)),
                array("i", range(i * each, (i + 1) * each)).tobytes(),
                GREEDY,
                lora_id=lora_id,
            )
            for i, lora_id in enumerate(loras)
        )
        self.number += 1
        began = time.process_time()
        result = self.worker.run(Step(StepId(self.number), entries))
        ended = time.process_time()
        assert not result.faults
        return ended - began

    def decode(self, loras: list[int]) -> float:
        return self.run(1, loras, CONTEXT - 1)


def kinds_of(plain: Steps, adapted: Steps, rows: int) -> dict[str, Callable[[], float]]:
    """The kinds of decode steps of so many rows."""
    mixed = sorted(i % (NUM_LORAS + 1) for i in range(rows))
    part = [0] * (rows // (NUM_LORAS + 1))
    return {
        "plain": lambda: plain.decode([0] * rows),
        "base": lambda: adapted.decode([0] * rows),
        "mixed": lambda: adapted.decode(mixed),
        "one": lambda: adapted.decode([1] * rows),
        "merged": lambda: sum(plain.decode(part) for _ in range(NUM_LORAS + 1)),
    }


def prompts_of(plain: Steps, adapted: Steps) -> dict[str, Callable[[], float]]:
    """The kinds of steps with one prompt."""
    return {
        "plain": lambda: plain.run(PROMPT, [0]),
        "base": lambda: adapted.run(PROMPT, [0]),
        "one": lambda: adapted.run(PROMPT, [1]),
    }


def measure(kinds: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each kind; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, run in kinds.items():
            taken = run()
            if number:
                seconds[name].append(taken)
    return {name: round(1e3 * median(found), 3) for name, found in seconds.items()}


def load(shape: str, weights: str, most: int) -> Worker:
    settings = WorkerSettings(
        model=f"random:{shape}",
        max_batch_size=most,
        max_batch_tokens=most * CONTEXT,
        kernels=Kernels(weights=weights, threads=1),
        kv=KVSettings(kv_slots=2 * most * max(CONTEXT, PROMPT)),
    )
    return Worker.load(settings, lambda what, done, total: None)


def figures(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    for weights in options.weights:
        most = max(options.rows)
        plain, worker = (load(options.shape, weights, most) for _ in range(2))
        num_bytes = 0
        for i in range(1, NUM_LORAS + 1):
            path = make_lora(folder / f"{weights}{i}", sizes_of(worker), i)
            report = worker.load_lora(LoraSpec(i, f"lora{i}", str(path)))
            assert not report.error, report.error
            num_bytes = report.num_bytes
        common = {"shape": options.shape, "weights": plain.report.weights, "lora_bytes": num_bytes}
        workers = Steps(plain), Steps(worker)
        for rows in options.rows:
            found = measure(kinds_of(*workers, rows), options.rounds)
            yield {**common, "step": "decode", "rows": rows, "ms": found}
        found = measure(prompts_of(*workers), max(3, options.rounds // 2))
        yield {**common, "step": "prefill", "rows": PROMPT, "ms": found}


def main() -> None:
    options = parse()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in figures(options, Path(folder)):
            rows.append(row)
            print(json.dumps(row))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
