"""Quantizing to int4, and models with int4 weights; `test_grouped` tests their linears."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.worker.cpu.kernels.linears.tile_formats import HAS_VNNI
from engine.worker.ports import dequantize
from engine.worker.weights.formats.int4 import GROUP, SCALES, quantize
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import make_checkpoint
from tests.noise import noise

VNNI = pytest.mark.skipif(not HAS_VNNI, reason="8-bit activations need a CPU with VNNI")
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


def test_the_quantization_error_is_at_most_one_step() -> None:
    """Half a step, but for weights near the end of the range that has 7 steps only."""
    weight = noise(70, 100) * torch.logspace(-2, 2, 70)[:, None]
    found = quantize(weight)
    steps = found.tensors[SCALES].float().abs().repeat_interleave(GROUP, dim=1)[:, :100]
    error = (dequantize(found) - weight).abs()
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert (error <= steps * 1.001 + 0.25 * largest).all()
    relative = (error.square().sum() / weight.square().sum()).sqrt()
    assert 0.05 < relative < 0.1  # of normally distributed weights


def test_quantizing_a_quantized_weight_changes_nothing_and_zeros_stay_zero() -> None:
    once = quantize(noise(7, 40))
    assert quantize(once) is once
    assert not dequantize(quantize(torch.zeros(2, 5))).any()


@pytest.mark.parametrize(("bits", "bound"), [("14", 0.01), pytest.param("8", 0.4, marks=VNNI)])
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_logits_in_int4_are_those_of_the_dequantized_weights(
    tmp_path: Path, variant: str, bits: str, bound: float
) -> None:
    """What is left is the error of the inputs, in standard deviations of the logits."""
    path = make_checkpoint(tmp_path, variant) / "model.safetensors"
    worker = load_worker(tmp_path, attention="cpu", weights="int4", activation_bits=bits)
    found = Driver(worker).logits((0, TOKENS))[0]
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            tensors[name] = dequantize(quantize(tensors[name])).contiguous()
    save_file(tensors, path)
    exact = Driver(load_worker(tmp_path, attention="cpu")).logits((0, TOKENS))[0]
    assert worker.report.weights.startswith(f"int4 ({bits}-bit activations")
    assert (found - exact).abs().max() < bound * exact.std()
