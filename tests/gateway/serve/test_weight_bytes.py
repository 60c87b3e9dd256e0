"""The estimate of a checkpoint's memory is what its weights take once they are read."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from adapters.gguf.blocks import FORMATS
from engine.worker.cpu.kernels.linears.grouped_panels import Panel
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cuda.model.four_bit import FORMATS_IN_4_BITS
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
    num_bytes = weight.groups.scales.nbytes + weight.layout.bits * weight.groups.steps.numel() / 8
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


def gguf_bytes(folder: Path, kind: Kind, **settings: str) -> float:
    """The estimate for a weight of a file with one matrix."""
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    rows = np.zeros((OUTPUTS, INPUTS // per_block * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = str(folder / "model.gguf")
    return weight_bytes(load({"model": path, **settings})) / (INPUTS * OUTPUTS)


@pytest.mark.parametrize("kind", FORMATS)
def test_matrices_of_gguf_files_need_what_the_cpu_packs_them_into(
    tmp_path: Path, kind: Kind
) -> None:
    layout = FORMATS[kind].layout
    assert gguf_bytes(tmp_path, kind) == Panel(layout).block_bytes / WIDTH / layout.block


@pytest.mark.parametrize("kind", FORMATS)
def test_a_gpu_keeps_or_converts_matrices_of_gguf_files(tmp_path: Path, kind: Kind) -> None:
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    stays = FORMATS[kind].layout.name in FORMATS_IN_4_BITS
    expected = block_bytes / per_block if stays else 1.0
    assert gguf_bytes(tmp_path, kind, device="cuda") == expected


@pytest.mark.parametrize(("weights", "num_bytes"), [("int8", 1.0), ("int4", 0.5625)])
def test_gguf_files_in_another_format_need_that(
    tmp_path: Path, weights: str, num_bytes: float
) -> None:
    assert gguf_bytes(tmp_path, Kind.Q2_K, weights=weights) == num_bytes
