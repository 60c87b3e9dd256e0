import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import StartupError
from engine.worker.cpu.kernels.linears.tile_formats import HAS_VNNI
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker.weights.checkpoint_files import QuantizedFiles
from engine.worker.weights.formats.int8 import quantize
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import make_checkpoint, make_model
from tests.models.loras import logits_of

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
BOTH: dict[str, Any] = {  # of inputs and weights
    "actorder": None, "block_structure": None, "group_size": None, "num_bits": 8,
    "observer_kwargs": {}, "symmetric": True, "type": "int",
}  # fmt: skip
SCHEME: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": BOTH | {"dynamic": True, "observer": None, "strategy": "token"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": BOTH | {"dynamic": False, "observer": "minmax", "strategy": "channel"},
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": 1.2,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
NEEDS_VNNI = pytest.mark.skipif(not HAS_VNNI, reason="8-bit activations need a CPU with VNNI")


def write(directory: Path, variant: str = "llama", scheme: object = SCHEME, **sizes: Any) -> Any:
    """Write a checkpoint with int8 linears; returns the dequantized model."""
    path = make_checkpoint(directory, variant, **sizes) / "model.safetensors"
    model = make_model(variant, **sizes)
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        weight = quantize(tensor)
        scales = weight.scales.bfloat16()
        tensors[name], tensors[f"{name}_scale"] = weight.values, scales[:, None].clone()
        parameters[name].data.copy_(weight.values * scales.float()[:, None])
    save_file(tensors, path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return model


@pytest.mark.parametrize("variant", ["llama", "qwen2_tied", "qwen3"])
def test_float32_logits_are_those_of_the_dequantized_model(tmp_path: Path, variant: str) -> None:
    expected = logits_of(write(tmp_path, variant), TOKENS)
    for attention, weights in (("reference", "auto"), ("cpu", "float32")):
        worker = load_worker(tmp_path, attention=attention, weights=weights)
        found = Driver(worker).logits((0, TOKENS))[0]
        assert (found - expected).abs().max() < 1e-4


# Largest error of a logit where only activations are quantized: 14 bits are 130 times finer.
LOGIT_ERRORS = {"14": 5e-3, "8": 0.2}


@pytest.mark.parametrize("bits", ["14", pytest.param("8", marks=NEEDS_VNNI)])
def test_auto_computes_in_int8_only_what_is_stored_in_int8(tmp_path: Path, bits: str) -> None:
    expected = logits_of(write(tmp_path), TOKENS)
    own, all_in_int8 = (
        load_worker(tmp_path, attention="cpu", weights=weights, activation_bits=bits)
        for weights in ("auto", "int8")
    )
    assert own.report.weights == all_in_int8.report.weights
    assert own.report.weights.startswith(f"int8 ({bits}-bit activations")
    found, other = (Driver(worker).logits((0, TOKENS))[0] for worker in (own, all_in_int8))
    assert (found - expected).abs().max() < LOGIT_ERRORS[bits]
    assert not torch.equal(found, other)  # the head is stored in floats
    if bits == "14":  # fine enough to see the error of the head's weights
        assert (other - expected).abs().max() > 2 * (found - expected).abs().max()


def test_every_shard_has_the_scales_of_its_rows(tmp_path: Path) -> None:
    model = write(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = dict(model.named_parameters())[name]
    files = QuantizedFiles(tmp_path)
    assert files.shape(name) == tuple(whole.shape)
    part = files.read(name, (slice(4, 9), slice(24, 48)))
    assert not isinstance(part, Tensor)
    torch.testing.assert_close(part.dequantize(), whole[4:9, 24:48], rtol=1e-6, atol=0)
    assert not any(one.endswith("_scale") for one in files.names)


CHANGES: list[tuple[tuple[str, ...], object]] = [
    (("quant_method",), "bitsandbytes"),
    (("format",), "marlin-24"),
    (("quantization_status",), "frozen"),
    (("kv_cache_scheme",), {"num_bits": 8}),
    (("sparsity_config",), {"format": "sparse-bitmask"}),
    (("config_groups",), {}),
    (("config_groups", "group_0", "targets"), ["Conv2d"]),
    (("config_groups", "group_0", "input_activations"), None),
    (("config_groups", "group_0", "output_activations"), {"num_bits": 8}),
    (("config_groups", "group_0", "weights", "num_bits"), 4),
    (("config_groups", "group_0", "weights", "type"), "float"),
    (("config_groups", "group_0", "weights", "symmetric"), False),
    (("config_groups", "group_0", "weights", "strategy"), "group"),
    (("config_groups", "group_0", "weights", "group_size"), 128),
    (("config_groups", "group_0", "input_activations", "dynamic"), False),
    (("config_groups", "group_0", "input_activations", "strategy"), "tensor"),
]


@pytest.mark.parametrize(("path", "value"), CHANGES)
def test_the_error_for_another_scheme_names_the_field(
    tmp_path: Path, path: tuple[str, ...], value: object
) -> None:
    scheme = json.loads(json.dumps(SCHEME))
    inner = scheme
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    write(tmp_path, scheme=scheme)
    with pytest.raises(StartupError, match=rf"quantization_config.*{path[-1]}"):
        Checkpoint.open(str(tmp_path))


def test_integers_without_scales_are_rejected(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.weight_scale"]
    save_file(tensors, path)
    with pytest.raises(StartupError, match=r"k_proj\.weight is I8 without"):
        load_worker(tmp_path)


def test_scales_of_another_shape_are_rejected(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.weight_scale"] = torch.ones(1)
    save_file(tensors, path)
    with pytest.raises(StartupError, match=r"k_proj\.weight_scale has shape \[1\]"):
        load_worker(tmp_path)
