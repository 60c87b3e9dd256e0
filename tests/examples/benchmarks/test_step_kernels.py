from pathlib import Path
from typing import Any

import pytest

from adapters.models.checkpoint import read_config
from engine.worker.cpu.limits import PlainReads
from engine.worker.process.worker import Worker
from engine.worker_settings import Kernels, KVSettings, WorkerSettings
from examples.benchmarks.layers import step_kernels
from gateway.commands.offline_bench.roofline import WeightSizes, Work
from tests.models.checkpoints import make_checkpoint


def load(directory: Path) -> Worker:
    settings = WorkerSettings(
        model=str(directory),
        max_batch_size=2,
        max_batch_tokens=64,
        kernels=Kernels(weights="int8"),
        kv=KVSettings(kv_slots=640),
    )
    return Worker.load(settings, lambda what, done, total: None)


def test_kernels_of_decodes_and_prompts_are_timed(tmp_path: Path, reads: PlainReads) -> None:
    # Widths that no format pads.
    widths: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    directory = make_checkpoint(tmp_path, max_position_embeddings=256, **widths)
    config = read_config(directory)
    sizes = WeightSizes.of(config)
    steps = step_kernels.KnownSteps(load(directory), sizes)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    for work in (Work(2, 1, 160), Work(1, 40, 40)):
        found = step_kernels.measure(steps, work, reads, 0.0)
        assert found["repeats"] == step_kernels.MIN_REPEATS
        kernels = {each["name"]: each for each in found["kernels"]}
        assert kernels["attention"]["calls"] == layers
        assert kernels["attention"]["attended"]["operations"] == sizes.attention(work)
        head = kernels[f"linear {hidden} → {config['vocab_size']}"]
        assert (head["calls"], head["elements"]) == (1, sizes.head_elements)
        assert head["operations"] == 2 * sizes.head_elements * work.num_requests
        assert sum(each["elements"] for each in found["kernels"]) == sizes.read_elements
        assert all(0 <= each["chunks"] <= each["milliseconds"] for each in found["kernels"])
        assert all(each["cached_chunks"] >= 0 for each in found["kernels"])


@pytest.mark.parametrize(
    ("variant", "scan", "states"),
    [("qwen3_5", "delta rule", 4 * 2 * 8 * 8), ("granite_hybrid", "mamba scan", 3 * 8 * 16 * 8)],
)
def test_kernels_of_recurrent_layers_are_timed(
    tmp_path: Path, reads: PlainReads, variant: str, scan: str, states: int
) -> None:
    directory = make_checkpoint(tmp_path, variant, max_position_embeddings=256)
    sizes = WeightSizes.of(read_config(directory))
    steps = step_kernels.KnownSteps(load(directory), sizes)
    for work in (Work(2, 1, 160), Work(1, 40, 40)):
        found = step_kernels.measure(steps, work, reads, 0.0)
        kernels = {each["name"]: each for each in found["kernels"]}
        assert kernels[scan]["calls"] == kernels["convolution"]["calls"] > 0
        assert kernels[scan]["attended"]["bytes"] == 2 * 4 * work.num_requests * states
        assert kernels["attention"]["attended"]["operations"] < sizes.attention(work)


def test_what_a_step_loses_is_split() -> None:
    kernel = {"name": "linear 4 → 8", "milliseconds": 6.0, "chunks": 5.0, "cached_chunks": 4.5}
    step = {
        "format": "int8",
        "step": "32 rows",
        "load": 0.5,
        "milliseconds": 10.0,
        "read_rate": 1e9,
        "kernels": [{**kernel, "calls": 2, "elements": 10**6, "operations": 4 * 10**9}],
    }
    peaks = {"int8": 1e12, "float32": 1e11}
    page = step_kernels.page(
        {"cpu": "Zen", "cores": 2, "shape": "M500", "peaks": peaks, "steps": [step]}
    )
    assert "| linear 4 → 8 | 6.00 (4.00) |" in page
    assert "| of the limit | 40 % compute |" in page
    split = "linear 4 → 8 20.0 (waiting 10.0, memory 5.0, instructions 5.0)"
    assert f"60 % missing: Python, interference 40.0; {split}; the rest 0.0" in page
    assert step_kernels.missing({**step, "read_rate": 1e8}, peaks) == (
        "0 % missing: Python, interference 40.0; linear 4 → 8 -40.0; the rest 0.0"
    )
