import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.errors import StartupError
from engine.worker.cuda.kernels.library import TritonKernels
from engine.worker.weights.expert_files import ExpertFiles
from engine.worker.weights.formats.mxfp4 import EXPONENTS, mxfp4_weight
from tests.engine.worker.cuda.fleet import gpus
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.engine.worker.cuda.standing import load_stored
from tests.engine.worker.process.driving import Driver, load_worker
from tests.engine.worker.process.fleet import fleet
from tests.models.checkpoints import make_model
from tests.models.loras import logits_of

SIZES = {"intermediate_size": 64, "hidden_size": 64}


def packed(weight: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales for a fused matrix `[experts, in, out]`."""
    experts, inputs, outputs = weight.shape
    random = torch.Generator().manual_seed(seed)
    shape = (experts, outputs, inputs // 32, 16)
    blocks = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    scales = torch.randint(119, 123, shape[:3], generator=random, dtype=torch.uint8)
    return blocks, scales


def write(directory: Path, scale: float = 0.2) -> Any:
    """A checkpoint whose experts are MXFP4, and the model that transformers makes of it."""
    model = make_model("gpt_oss", scale=scale, **SIZES)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for seed, name in enumerate(sorted(tensors)):
        if re.search(r"experts\.(gate_up|down)_proj$", name):
            blocks, scales = packed(tensors.pop(name), seed)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(name).data.copy_(whole)
    save_file(tensors, directory / "model.safetensors")
    edit_config(directory, quantization_config={"quant_method": "mxfp4"})
    return model


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("mxfp4")
    return directory, write(directory)


TOKENS = [5, 80, 3, 3, 41, 17, 9, 60, 22, 71, 11]


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"attention": "reference"}, 1e-4),
        ({"attention": "cpu", "weights": "float32"}, 1e-4),
        ({"attention": "cpu", "activation_bits": "14"}, 2e-3),  # as stored
        ({"attention": "cpu"}, 0.2),
    ],
)
def test_logits_are_those_of_transformers(
    checkpoint: tuple[Path, Any], settings: dict[str, Any], tolerance: float
) -> None:
    directory, model = checkpoint
    worker = load_worker(directory, **settings)
    found = Driver(worker).logits((0, TOKENS))[0]
    assert (found - logits_of(model, TOKENS)).abs().max() < tolerance
    is_as_stored = settings["attention"] == "cpu" and "weights" not in settings
    assert worker.report.weights.startswith("mxfp4") == is_as_stored


def test_a_gpu_computes_experts_as_stored(checkpoint: tuple[Path, Any]) -> None:
    directory, model = checkpoint
    worker = load_stored(directory)
    assert worker.report.weights == "mxfp4"
    found = Driver(worker).logits((0, TOKENS))[0]
    assert (found - logits_of(model, TOKENS)).abs().max() < 1e-4


def test_the_kernel_of_a_gpu_multiplies_experts_as_stored(checkpoint: tuple[Path, Any]) -> None:
    """In its interpreter; activations are float16."""
    directory, model = checkpoint
    worker = load_stored(directory, "float16", TritonKernels(four_bit=interpreted("four_bit")))
    expected = logits_of(model, TOKENS)
    found = Driver(worker).logits((0, TOKENS))[0]
    assert float((found - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("ranks", [2, 4])  # with 4, columns of down are half a group
def test_ranks_split_the_columns_of_experts(checkpoint: tuple[Path, Any], ranks: int) -> None:
    directory, model = checkpoint
    with fleet(directory, 1, ranks, attention="reference") as workers:
        found = Driver(workers).logits((0, TOKENS))[0]
    assert (found - logits_of(model, TOKENS)).abs().max() < 1e-4
    with gpus(directory, 1, ranks) as (on_gpus, _):
        found = Driver(on_gpus).logits((0, TOKENS))[0]
    assert (found - logits_of(model, TOKENS)).abs().max() < 1e-4


def test_a_weight_is_exactly_its_codes_times_its_scales() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    nibbles = (codes[::2] | (codes[1::2] << 4)).repeat(2, 1)
    weight = mxfp4_weight(nibbles, torch.tensor([[127], [120]], dtype=torch.uint8))
    assert not isinstance(weight, Tensor)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    row = torch.cat([numbers, -numbers]).repeat(2)
    assert torch.equal(weight.dequantize(), torch.stack([row, row / 128]))
    assert torch.equal(weight.tensors[EXPONENTS], torch.tensor([[127], [120]], dtype=torch.uint8))


def test_scales_that_float16_lacks_make_a_weight_float32() -> None:
    nibbles = torch.full((2, 16), 0x77, dtype=torch.uint8)  # 6
    weight = mxfp4_weight(nibbles, torch.tensor([[90], [150]], dtype=torch.uint8))
    assert isinstance(weight, Tensor)
    assert weight[:, 0].tolist() == [6 * 2.0**-37, 6 * 2.0**23]


@pytest.mark.parametrize(
    ("suffix", "change", "named"),
    [
        ("scales", None, "gate_up_proj_scales is missing"),
        ("scales", lambda tensor: tensor[:, :, :1], "which is not MXFP4"),
        ("blocks", lambda tensor: tensor.float(), "_blocks is F32"),
    ],
)
def test_a_wrong_tensor_is_named(
    checkpoint: tuple[Path, Any], tmp_path: Path, suffix: str, change: Any, named: str
) -> None:
    tensors = load_file(checkpoint[0] / "model.safetensors")
    name = f"model.layers.0.mlp.experts.gate_up_proj_{suffix}"
    changed = tensors.pop(name)
    if change is not None:
        tensors[name] = change(changed).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=re.escape(named)):
        ExpertFiles(tmp_path, is_interleaved=True).shape(
            "model.layers.0.mlp.experts.0.gate_proj.weight"
        )
