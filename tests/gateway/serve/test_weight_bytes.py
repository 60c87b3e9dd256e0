"""The estimate of a checkpoint's memory is what its weights take once they are read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.worker.weights.formats.grouped import GroupedWeight
from engine.worker.weights.int4_files import Int4Files
from gateway.serve.memory import loaded_bytes, weight_bytes
from gateway.settings.settings import load
from tests.worker_settings import worker_report

INPUTS, OUTPUTS, GROUP = 1024, 512, 64
NAME = "model.layers.0.mlp.up_proj"


def write(directory: Path, groups: torch.Tensor) -> None:
    words = torch.randint(1 << 30, (INPUTS // 8, OUTPUTS), dtype=torch.int32)
    tensors = {
        f"{NAME}.qweight": words,
        f"{NAME}.qzeros": torch.full((INPUTS // GROUP, OUTPUTS // 8), 0x77777777).int(),
        f"{NAME}.scales": torch.ones(INPUTS // GROUP, OUTPUTS, dtype=torch.float16),
        f"{NAME}.g_idx": groups.int(),
    }
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("is_ordered", [False, True])
def test_packed_weights_need_what_they_become(tmp_path: Path, is_ordered: bool) -> None:
    groups = torch.arange(INPUTS) // GROUP
    write(tmp_path, groups[torch.randperm(INPUTS)] if is_ordered else groups)
    weight = Int4Files(tmp_path, "gptq").read(f"{NAME}.weight", (slice(None), slice(None)))
    assert isinstance(weight, GroupedWeight)
    num_bytes = sum(each.nbytes for each in weight.tensors.values())
    estimate = weight_bytes(load({"model": str(tmp_path)}))
    assert num_bytes <= estimate <= 1.1 * num_bytes


@pytest.mark.parametrize(("weights", "num_bytes"), [("int8", 1.0), ("float32", 4.0)])
def test_packed_weights_in_another_format_need_that(
    tmp_path: Path, weights: str, num_bytes: float
) -> None:
    write(tmp_path, torch.arange(INPUTS) // GROUP)
    estimate = weight_bytes(load({"model": str(tmp_path), "weights": weights}))
    assert num_bytes <= estimate / (INPUTS * OUTPUTS) <= num_bytes + 0.1


@pytest.mark.parametrize("name", ["int4_g64+q8_0 (AVX2)", "int4", "bfloat16 (AVX-512 BF16)"])
def test_a_loaded_model_counts_its_weights_as_they_are_stored(tmp_path: Path, name: str) -> None:
    write(tmp_path, torch.arange(INPUTS) // GROUP)
    report = worker_report(num_parameters=INPUTS * OUTPUTS, weights=name)
    num_bytes = loaded_bytes(load({"model": str(tmp_path)}), report) / (INPUTS * OUTPUTS)
    assert num_bytes == pytest.approx(2 if "bfloat16" in name else 0.55, rel=0.03)
