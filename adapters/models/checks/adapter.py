"""What is wrong with a LoRA adapter, as far as its config and the headers of its tensors tell."""

import json
from collections.abc import Mapping
from pathlib import Path

from engine.errors import StartupError
from engine.worker.lora.peft_config import CONFIG_FILE, PeftConfig
from engine.worker.lora.peft_names import (
    WEIGHTS_FILE,
    check_rank,
    check_shape,
    check_target,
    is_of_encoder,
    place_of,
)
from engine.worker.weights.headers import TensorHeader, read_header

Sizes = tuple[int, int]


def check_adapter(
    name: str, directory: Path, headers: Mapping[str, TensorHeader], max_rank: int
) -> None:
    """Raise `StartupError` unless the adapter is plain LoRA with ranks up to `max_rank`, and fits
    the linears of the model, as far as the `headers` of its checkpoint have their shapes."""
    try:
        config = PeftConfig.parse(_config(directory / CONFIG_FILE))
        _check_tensors(read_header(directory / WEIGHTS_FILE), config, _linears(headers), max_rank)
    except StartupError as error:
        raise StartupError(f"LoRA adapter {name!r}: {error}") from error


def _config(path: Path) -> dict[str, object]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # the path has a NUL
        raise StartupError(f"cannot read {str(path)!r}: {error}") from error
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a JSON object")
    return config


def _linears(headers: Mapping[str, TensorHeader]) -> dict[str, Sizes]:
    """Outputs and inputs of the linears in a checkpoint of floats, by module; none of others."""
    shapes = {
        name.removesuffix(".weight"): header.shape
        for name, header in headers.items()
        if name.endswith(".weight") and len(header.shape) == 2 and ".experts." not in name
    }
    is_plain = all(header.dtype in ("F64", "F32", "F16", "BF16") for header in headers.values())
    if not is_plain or any(name.endswith(".c_attn") for name in shapes):  # GPT-2's are transposed
        return {}
    prefix = "model." if "embed_tokens" in shapes else ""
    return {
        prefix + name.replace("language_model.", ""): (shape[0], shape[1])
        for name, shape in shapes.items()
        if any(part.isdecimal() for part in name.split(".")) and not is_of_encoder(name)
    }


def _check_tensors(
    tensors: Mapping[str, TensorHeader],
    config: PeftConfig,
    linears: Mapping[str, Sizes],
    max_rank: int,
) -> None:
    if not tensors:
        raise StartupError(f"{WEIGHTS_FILE} has no tensors")
    for name, header in sorted(tensors.items()):
        module, factor = place_of(name, linears or None)
        check_target(name, module, config)
        check_rank(module, config, max_rank)
        if module in linears:
            check_shape(module, factor, header.shape, linears[module], config)
