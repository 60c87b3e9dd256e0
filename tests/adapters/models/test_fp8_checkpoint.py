import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.models.checks.checkpoint import check_checkpoint
from engine.errors import StartupError
from engine.worker.cuda.device import CudaDevice
from engine.worker.cuda.model import operators
from engine.worker.cuda.model.fp8_weights import Fp8WeightLinear
from engine.worker.process.worker import Worker
from engine.worker.weights.checkpoint import Checkpoint
from tests.engine.worker.cuda.standing import StandingGpu, load_stored
from tests.engine.worker.process.driving import Driver, load_worker, settings_for
from tests.models.checkpoints import make_checkpoint, make_model
from tests.models.loras import logits_of

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
BLOCK = 20  # of outputs and inputs; no size of the model is a multiple of it
BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
GROUP = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
}
TENSORS = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
SCHEMES: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "blocks": (BLOCKS, "_scale_inv", (BLOCK, BLOCK)),
    "channels": (CHANNELS, "_scale", (1, 1 << 10)),
    "tensors": (TENSORS, "_scale", (1 << 10, 1 << 10)),
}

# As published; the model has to be as large as a block.
LARGE = {
    "large blocks": (BLOCKS | {"weight_block_size": [128, 128]}, "_scale_inv", (128, 128)),
}


def widened(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """The scale of each weight."""
    for axis, size in enumerate(block):
        scales = scales.repeat_interleave(min(size, shape[axis]), axis)
    return scales[: shape[0], : shape[1]]


def write(directory: Path, scheme: str, variant: str = "llama", **sizes: Any) -> Any:
    """Write a checkpoint with FP8 linears; returns the model of its numbers."""
    config, suffix, block = (SCHEMES | LARGE)[scheme]
    path = make_checkpoint(directory, variant, **sizes) / "model.safetensors"
    model = make_model(variant, **sizes)
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(sorted(load_file(path).items())):
        tensors[name] = tensor
        if not name.endswith("_proj.weight") or name not in parameters:  # experts are not
            continue
        counts = [-(-size // step) for size, step in zip(tensor.shape, block, strict=True)]
        generator = torch.Generator().manual_seed(number)
        scales = 0.001 + 0.01 * torch.rand(counts, generator=generator)
        every = widened(scales, block, tensor.shape)
        tensors[name] = (tensor / every).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name + suffix] = scales if scheme != "tensors" else scales.reshape(())
        if scheme == "tensors":
            tensors[name.replace(".weight", ".input_scale")] = torch.tensor(1.0)
        parameters[name].data.copy_(tensors[name].float() * every)
    save_file(tensors, path)
    whole = json.loads((directory / "config.json").read_text()) | {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps(whole))
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_numbers_in_the_file(tmp_path: Path, scheme: str) -> None:
    model = write(tmp_path, scheme)
    check_checkpoint(tmp_path, 0)
    exact = Driver(load_worker(tmp_path, attention="cpu", weights="float32"))
    torch.testing.assert_close(
        exact.logits((0, TOKENS))[0], logits_of(model, TOKENS), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("is_apart", [False, True])
def test_checkpoints_of_modelopt_are_read(tmp_path: Path, is_apart: bool) -> None:
    """Older versions have a file for the scheme, which config.json does not name."""
    model = write(tmp_path, "tensors")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": MODELOPT}
    if is_apart:
        del config["quantization_config"]
        scheme = {name: MODELOPT[name] for name in MODELOPT if name != "quant_method"}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": scheme}))
    path.write_text(json.dumps(config))
    worker = Driver(load_worker(tmp_path, attention="cpu", weights="float32"))
    torch.testing.assert_close(
        worker.logits((0, TOKENS))[0], logits_of(model, TOKENS), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(("weights", "allowed"), [("auto", 0.05), ("int8", 0.2)])
def test_the_loss_of_other_formats_is_that_of_rounding(
    tmp_path: Path, weights: str, allowed: float
) -> None:
    logits = logits_of(write(tmp_path, "blocks", "qwen3"), TOKENS)
    worker = load_worker(tmp_path, attention="cpu", weights=weights)
    assert worker.report.weights.startswith("bfloat16" if weights == "auto" else "int8")
    found = Driver(worker).logits((0, TOKENS))[0]
    assert float((found - logits).abs().max()) < allowed * float(logits.std())


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gpu_computes_with_the_weights_as_they_are_stored(
    tmp_path: Path, scheme: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fp8 activations, or with 16-bit ones for scales of blocks and before Hopper."""
    linears: list[Fp8WeightLinear] = []

    def made(*given: Any) -> Fp8WeightLinear:
        linears.append(Fp8WeightLinear(*given))
        return linears[-1]

    monkeypatch.setattr(operators, "Fp8WeightLinear", made)
    model = write(tmp_path, scheme)
    settings = settings_for(tmp_path, "reference", dtype="bfloat16", kv_dtype="auto")
    gpu = StandingGpu(total_bytes=1 << 31, capability=capability)
    preferred = Checkpoint.open(str(tmp_path)).preferred_format
    device = CudaDevice(settings, gpu, preferred)
    worker = Worker.load(settings, lambda *_: None, device)
    assert worker.report.weights == "fp8"
    assert bool(linears) == (scheme == "blocks" or capability < (9, 0))
    assert all(each.weight.values.dtype == torch.float8_e4m3fn for each in linears)
    found, wanted = Driver(worker).logits((0, TOKENS))[0], logits_of(model, TOKENS)
    allowed = 0.25 if capability >= (9, 0) and scheme != "blocks" else 0.1
    assert float((found.float() - wanted).abs().max()) < allowed * float(wanted.std())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_of_latent_vectors_may_be_fp8(tmp_path: Path, scheme: str) -> None:
    """Those of keys are multiplied transposed."""
    model = write(tmp_path, scheme, "deepseek_v3")
    worker = load_worker(tmp_path, attention="cpu", weights="float32")
    torch.testing.assert_close(
        Driver(worker).logits((0, TOKENS))[0], logits_of(model, TOKENS), rtol=0, atol=1e-4
    )


def test_matrices_of_latent_vectors_in_fp8_are_widened_to_the_dtype_of_a_gpu(
    tmp_path: Path,
) -> None:
    model = write(tmp_path, "channels", "deepseek_v3")
    found = Driver(load_stored(tmp_path, "float16")).logits((0, TOKENS))[0]
    wanted = logits_of(model, TOKENS)
    assert float((found - wanted).abs().max()) < 0.03 * float(wanted.std())


def test_fused_tensors_may_be_fp8(tmp_path: Path) -> None:
    model = write(tmp_path, "blocks", "phi3")
    worker = load_worker(tmp_path, attention="cpu", weights="float32")
    torch.testing.assert_close(
        Driver(worker).logits((0, TOKENS))[0], logits_of(model, TOKENS), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        (BLOCKS | {"weight_block_size": [8, 8]}, "q_proj.weight_scale_inv has shape [2, 2]"),
        (BLOCKS | {"weight_block_size": "wide"}, "a block of weights is 'wide'"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "quant_algo='NVFP4' is not supported; known: 'FP8', "),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "only its own library reads"),
    ],
)
def test_the_error_names_what_is_wrong(tmp_path: Path, scheme: object, named: str) -> None:
    write(tmp_path, "blocks")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": scheme}))
    with pytest.raises(StartupError) as refused:
        load_worker(tmp_path)
    assert named in str(refused.value)
