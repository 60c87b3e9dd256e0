# mypy: disable-error-code="no-untyped-call"
import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import StartupError
from engine.worker.cuda.kernels.library import TritonKernels
from engine.worker.ports import dequantize
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker.weights.formats.grouped import GroupedWeight, dequantize_groups
from engine.worker.weights.int4_files import Int4Files
from tests.engine.worker.cuda.fleet import gpus
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.engine.worker.cuda.standing import load_stored
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import make_checkpoint, make_model
from tests.models.loras import logits_of

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, from the lowest bits on
WEIGHTS = {
    "actorder": None, "dynamic": False, "group_size": 64, "num_bits": 4, "strategy": "group",
    "symmetric": True, "type": "int",
}  # fmt: skip
GROUP = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
PACK_QUANTIZED: dict[str, Any] = {
    "config_groups": {"group_0": {**GROUP, "weights": WEIGHTS}},
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "version": "gemm",
    "zero_point": True,
}


class Steps(NamedTuple):
    """A matrix rounded to 16 steps in each group."""

    steps: Tensor  # [out, in], 0 to 15
    scales: Tensor  # [out, groups]
    zeros: Tensor  # [out, groups]
    group_of: Tensor  # [in]

    @property
    def weight(self) -> Tensor:
        return (self.steps - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]


def rounded(weight: Tensor, group: int, *, is_symmetric: bool, is_ordered: bool = False) -> Steps:
    """In groups of neighbours, or of inputs in another order."""
    inputs = weight.shape[1]
    shuffle = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=shuffle) if is_ordered else torch.arange(inputs)
    groups = weight[:, order].float().unflatten(1, (-1, group))
    if is_symmetric:
        scales = groups.abs().amax(dim=2) / 7
        zeros = torch.full_like(scales, 8)
    else:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = (high - low) / 15
        zeros = (-low / scales).round()
    scales = scales.half().float()
    steps = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    places = order.argsort()
    return Steps(steps.flatten(1)[:, places], scales, zeros, places // group)


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight neighbours in an int32, in this order from the lowest bits on."""
    fields = numbers.long().unflatten(1, (-1, 8))[:, :, list(order)]
    whole = (fields << (4 * torch.arange(8))).sum(dim=2)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32).contiguous()


def compressed(found: Steps, stem: str, *, is_symmetric: bool) -> dict[str, Tensor]:
    tensors = {
        f"{stem}.weight_packed": words(found.steps),
        f"{stem}.weight_scale": found.scales.to(torch.float16).contiguous(),
        f"{stem}.weight_shape": torch.tensor(found.steps.shape),
    }
    if not found.group_of.equal(found.group_of.sort().values):
        tensors[f"{stem}.weight_g_idx"] = found.group_of.to(torch.int32)
    if not is_symmetric:
        tensors[f"{stem}.weight_zero_point"] = words(found.zeros.t()).t().contiguous()
    return tensors


def gptq(found: Steps, stem: str, offset: int = 1) -> dict[str, Tensor]:
    return {
        f"{stem}.qweight": words(found.steps).t().contiguous(),
        f"{stem}.qzeros": words((found.zeros.t() - offset) % 16),
        f"{stem}.scales": found.scales.t().half().contiguous(),
        f"{stem}.g_idx": found.group_of.to(torch.int32),
    }


def awq(found: Steps, stem: str) -> dict[str, Tensor]:
    return {
        f"{stem}.qweight": words(found.steps.t(), AWQ_OUTPUTS),
        f"{stem}.qzeros": words(found.zeros.t(), AWQ_OUTPUTS),
        f"{stem}.scales": found.scales.t().half().contiguous(),
    }


def write(
    directory: Path,
    kind: str = "pack-quantized",
    group: int = 64,
    scheme: Any = None,
    scale: float = 0.2,
) -> Any:
    """Write a checkpoint with int4 linears; returns the dequantized model.

    `kind` is "pack-quantized" (symmetric), "asymmetric", "gptq", "gptq_v2" or "awq"; with
    " ordered" inputs are in groups by activation.
    """
    kind, _, order = kind.partition(" ")
    path = make_checkpoint(directory, "llama", scale=scale, **SIZES) / "model.safetensors"
    model = make_model("llama", scale=scale, **SIZES)
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        is_symmetric = kind == "pack-quantized"
        width = tensor.shape[1] if group == -1 else group
        found = rounded(tensor, width, is_symmetric=is_symmetric, is_ordered=order != "")
        parameters[name].data.copy_(found.weight)
        stem = name.removesuffix(".weight")
        if kind in ("gptq", "gptq_v2"):
            tensors |= gptq(found, stem, offset=int(kind == "gptq"))
        elif kind == "awq":
            tensors |= awq(found, stem)
        else:
            tensors |= compressed(found, stem, is_symmetric=is_symmetric)
    save_file(tensors, path)
    schemes = {"gptq": GPTQ, "gptq_v2": {**GPTQ, "checkpoint_format": "gptq_v2"}, "awq": AWQ}
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = scheme or schemes.get(kind, PACK_QUANTIZED)
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize(
    ("kind", "group", "layout"),
    [
        ("pack-quantized", 128, "int4_128"),
        ("pack-quantized", 32, "int4"),
        ("pack-quantized", -1, "int4_128"),
        ("asymmetric", 64, "uint4_64"),
        ("gptq", 128, "uint4_128"),
        ("gptq_v2", 64, "uint4_64"),
        ("awq", 64, "uint4_64"),
    ],
)
def test_logits_are_those_of_the_dequantized_model(
    tmp_path: Path, kind: str, group: int, layout: str
) -> None:
    """Its weights are computed in as stored; what is left is the error of the inputs."""
    expected = logits_of(write(tmp_path, kind, group), TOKENS)
    worker = load_worker(tmp_path, attention="cpu", activation_bits="14")
    assert worker.report.weights == f"{layout} (14-bit activations)"
    found = Driver(worker).logits((0, TOKENS))[0]
    assert (found - expected).abs().max() < 5e-3 * expected.std()
    plain = Driver(load_worker(tmp_path, attention="cpu", weights="float32"))
    assert (plain.logits((0, TOKENS))[0] - expected).abs().max() < 1e-4
    on_gpu = load_stored(tmp_path)
    assert on_gpu.report.weights == layout
    found = Driver(on_gpu).logits((0, TOKENS))[0]
    allowed = 2e-3 if layout.startswith("u") else 1e-4  # zero points are rounded to float16
    assert (found - expected).abs().max() < allowed


def test_the_kernel_of_a_gpu_gives_the_logits_of_the_dequantized_model(tmp_path: Path) -> None:
    """In its interpreter; activations are float16."""
    kernels = TritonKernels(four_bit=interpreted("four_bit"))
    expected = logits_of(write(tmp_path, "awq", 64), TOKENS)
    found = Driver(load_stored(tmp_path, "float16", kernels)).logits((0, TOKENS))[0]
    assert float((found - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("group", [64, 128])  # columns of o are half a group of 128
def test_ranks_on_gpus_split_a_matrix_between_its_groups(tmp_path: Path, group: int) -> None:
    expected = logits_of(write(tmp_path, "awq", group), TOKENS)
    with gpus(tmp_path, 1, 2) as (workers, _):
        assert workers.report.weights == f"uint4_{group}"
        found = Driver(workers).logits((0, TOKENS))[0]
    assert (found - expected).abs().max() < 2e-3


@pytest.mark.parametrize("kind", ["pack-quantized", "gptq", "awq"])
def test_slices_of_a_matrix_are_those_of_the_whole(tmp_path: Path, kind: str) -> None:
    model = write(tmp_path, kind)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = dict(model.named_parameters())[name].detach()
    files = Int4Files(tmp_path, kind)
    assert files.shape(name) == tuple(whole.shape)
    for columns, is_stored in ((slice(64, 256), True), (slice(96, 256), False)):
        part = files.read(name, (slice(8, 40), columns))
        assert isinstance(part, Tensor) != is_stored
        torch.testing.assert_close(dequantize(part), whole[8:40, columns])


def test_a_matrix_whose_rows_are_read_head_by_head_is_unpacked_once(tmp_path: Path) -> None:
    """A matrix of 128 heads would take 200 times as long."""
    write(tmp_path, "awq")
    files = Int4Files(tmp_path, "awq")
    unpack = Mock(wraps=files._scheme.unpack)
    files._scheme = files._scheme._replace(unpack=unpack)
    for name in ("up", "gate"):
        for first in range(0, 256, 32):
            rows = slice(first, first + 32), slice(None)
            files.read(f"model.layers.0.mlp.{name}_proj.weight", rows)
    assert unpack.call_count == 2


CHANGES: list[tuple[dict[str, Any], str, object]] = [
    (GPTQ, "bits", 8),
    (GPTQ, "checkpoint_format", "marlin"),
    (GPTQ, "dynamic", {"-:.*down.*": {}}),
    (AWQ, "bits", 3),
    (AWQ, "version", "gemv"),
    (WEIGHTS, "num_bits", 8),
    (WEIGHTS, "type", "float"),
    (WEIGHTS, "strategy", "tensor"),
    (WEIGHTS, "dynamic", True),
    (WEIGHTS, "actorder", "dynamic"),
]


@pytest.mark.parametrize(("scheme", "field", "value"), CHANGES)
def test_the_error_for_another_scheme_names_the_field(
    tmp_path: Path, scheme: dict[str, Any], field: str, value: object
) -> None:
    changed, named = {**scheme, field: value}, field
    if scheme is WEIGHTS:
        changed = PACK_QUANTIZED | {"config_groups": {"group_0": {**GROUP, "weights": changed}}}
        named = f"weights.*{field}"
    write(tmp_path, scheme=changed)
    with pytest.raises(StartupError, match=f"quantization_config.*{named}"):
        Checkpoint.open(str(tmp_path))


@pytest.mark.parametrize("kind", ["gptq ordered", "gptq_v2 ordered", "pack-quantized ordered"])
def test_inputs_ordered_by_activation_are_computed_in_8_bits(tmp_path: Path, kind: str) -> None:
    """Each number is rounded once more, far less than to 4 bits."""
    expected = logits_of(write(tmp_path, kind), TOKENS)
    worker = load_worker(tmp_path, attention="cpu", activation_bits="14")
    assert worker.report.weights == "q8_0 (14-bit activations)"
    found = Driver(worker).logits((0, TOKENS))[0]
    assert (found - expected).norm() < 0.05 * expected.norm()
    plain = Driver(load_worker(tmp_path, attention="cpu", weights="float32"))
    assert (plain.logits((0, TOKENS))[0] - expected).abs().max() < 1e-4
    on_gpu = load_stored(tmp_path)
    assert on_gpu.report.weights == "int8"
    found = Driver(on_gpu).logits((0, TOKENS))[0]
    assert (found - expected).norm() < 0.15 * expected.norm()
    unrounded = logits_of(make_model("llama", **SIZES), TOKENS)
    assert (unrounded - expected).norm() > 0.5 * expected.norm()


@pytest.mark.parametrize("scale", [1.0, 1e-2])
def test_slices_of_inputs_ordered_by_activation_have_their_own_scales(
    tmp_path: Path, scale: float
) -> None:
    model = write(tmp_path, "gptq ordered")
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj"
    tensors = load_file(path)
    tensors[f"{name}.scales"] *= scale
    save_file(tensors, path)
    whole = model.get_submodule(name).weight.detach() * scale
    for columns in (slice(0, 256), slice(40, 256)):
        part = Int4Files(tmp_path, "gptq").read(f"{name}.weight", (slice(8, 40), columns))
        assert isinstance(part, GroupedWeight)
        rounded = dequantize_groups(part.groups, part.layout)[:, : part.inputs]
        error = (rounded - whole[8:40, columns]).abs().max()
        assert error < 5e-3 * whole.abs().max()


def test_a_group_that_has_no_scale_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(path)
    save_file({**tensors, f"{name}.g_idx": tensors[f"{name}.g_idx"] + 1}, path)
    with pytest.raises(StartupError, match=r"up_proj\.weight: \.g_idx is not one of 2 groups"):
        Int4Files(tmp_path, "gptq").shape(f"{name}.weight")


def test_packed_steps_without_scales_are_rejected(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.weight_scale"]
    save_file(tensors, path)
    with pytest.raises(StartupError, match=r"k_proj\.weight_scale is missing"):
        load_worker(tmp_path)
