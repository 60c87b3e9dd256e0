"""The files of a LoRA adapter: read once, hashed, and checked against the model's linears.

Tensors are named `base_model.model.MODULE.lora_A.weight` `[rank, in]` and `….lora_B.weight`
`[out, rank]`, where MODULE is the linear's name in Hugging Face's model.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from engine.errors import StartupError
from engine.worker.lora.peft_config import CONFIG_FILE, PeftConfig

WEIGHTS_FILE = "adapter_model.safetensors"
DIGEST_BYTES = 32
_PREFIXES = ("base_model.model.", "")
_FACTORS = {".lora_A.weight": "A", ".lora_B.weight": "B"}
# Ends of tensor names that belong to what is not supported.
_UNSUPPORTED = {
    ".lora_magnitude_vector": "DoRA is not supported",
    ".lora_embedding_A": "LoRA on embeddings is not supported",
    ".lora_embedding_B": "LoRA on embeddings is not supported",
    ".lora_B.bias": "a bias of lora_B is not supported",
    ".bias": "trained biases are not supported",
}


class LowRankPair(NamedTuple):
    """The LoRA of one module in float32: `up` has its scale."""

    down: Tensor  # A, [rank, in]
    up: Tensor  # scale · B, [out, rank]


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """A checked adapter: the LoRA of each module by name, and the digest of the files' bytes."""

    digest: str
    pairs: Mapping[str, LowRankPair]

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(len(pair.down) for pair in self.pairs.values())


def read_lora(
    directory: Path, linears: Mapping[str, tuple[int, int]], max_rank: int, digest: str = ""
) -> LoraFiles:
    """Read an adapter for a model whose linears have these outputs and inputs by name.

    Raises `StartupError` with one line that names the field or tensor, or if the files do not have
    the given digest.
    """
    texts = [_read(directory / name) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    found = _digest(texts)
    if digest not in ("", found):
        raise StartupError(f"the files in {directory} have changed since the adapter was loaded")
    config = PeftConfig.parse(_parsed(texts[0], directory))
    try:
        tensors = load(texts[1])
    except (SafetensorError, ValueError, KeyError) as error:
        raise StartupError(
            f"{directory / WEIGHTS_FILE} is not a safetensors file: {error}"
        ) from error
    return LoraFiles(found, _pairs(tensors, config, linears, max_rank))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # the path has a NUL
        raise StartupError(f"cannot read {str(path)!r}: {error}") from error


def _digest(texts: list[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()


def _parsed(text: bytes, directory: Path) -> dict[str, object]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{directory / CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{directory / CONFIG_FILE} is not a JSON object")
    return config


def _pairs(
    tensors: Mapping[str, Tensor],
    config: PeftConfig,
    linears: Mapping[str, tuple[int, int]],
    max_rank: int,
) -> dict[str, LowRankPair]:
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        module, factor = _place(name, linears)
        factors.setdefault(module, {})[factor] = _checked(name, tensor, config, module, max_rank)
    if not factors:
        raise StartupError(f"{WEIGHTS_FILE} has no tensors")
    for module in () if config.targets_all else linears:  # some are no linears for PyTorch
        if module not in factors and config.targets_module(module):
            raise StartupError(f"{WEIGHTS_FILE} has no LoRA of {module}, a target module")
    return {
        module: _pair(module, found, linears[module], config) for module, found in factors.items()
    }


def _place(name: str, linears: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    """The module that a tensor belongs to, and which factor it is."""
    for end, why in _UNSUPPORTED.items():
        if name.removesuffix(".weight").endswith(end):
            raise StartupError(f"tensor {name}: {why}")
    for end, factor in _FACTORS.items():
        if name.endswith(end):
            module = _module_of(name.removesuffix(end), linears)
            if module is None:
                raise StartupError(f"tensor {name}: this model has no such linear for LoRA")
            return module, factor
    raise StartupError(f"tensor {name} is not part of a LoRA")


def _module_of(path: str, linears: Mapping[str, tuple[int, int]]) -> str | None:
    """The linear's name in this model. Old GPT-2 checkpoints lack `transformer.`, text models of
    multimodal ones `language_model.`."""
    for prefix in _PREFIXES:
        if path.startswith(prefix):
            path = path.removeprefix(prefix)
            break
    names = (path, path.removeprefix("transformer."), path.replace("language_model.", ""))
    return next((name for name in names if name in linears), None)


def _checked(name: str, tensor: Tensor, config: PeftConfig, module: str, max_rank: int) -> Tensor:
    if not config.targets_module(module):
        raise StartupError(f"tensor {name}: {module} is not a target module of {CONFIG_FILE}")
    rank = config.rank_of(module)
    if rank > max_rank:
        raise StartupError(f"{module} has rank {rank}; --max-lora-rank allows {max_rank}")
    if not tensor.is_floating_point():
        raise StartupError(f"tensor {name} has dtype {tensor.dtype}, expected floats")
    if not bool(torch.isfinite(tensor).all()):
        raise StartupError(f"tensor {name} has NaN or infinite values")
    return tensor.float()


def _pair(
    module: str, factors: Mapping[str, Tensor], sizes: tuple[int, int], config: PeftConfig
) -> LowRankPair:
    outputs, inputs = sizes
    rank = config.rank_of(module)
    for factor, expected in (("A", (rank, inputs)), ("B", (outputs, rank))):
        name = f"{module}.lora_{factor}.weight"
        if factor not in factors:
            raise StartupError(f"tensor {name} is missing from {WEIGHTS_FILE}")
        if tuple(factors[factor].shape) != expected:
            raise StartupError(
                f"tensor {name} has shape {list(factors[factor].shape)}, but the model and "
                f"{CONFIG_FILE} imply {list(expected)}"
            )
    return LowRankPair(factors["A"], factors["B"] * config.scale_of(module))
