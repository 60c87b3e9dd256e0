"""Random LoRA adapters in PEFT's own format, and PEFT's logits for them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def adapted_model(
    variant: str, seed: int = 1, base: Mapping[str, Any] = MappingProxyType({}), **config: Any
) -> Any:
    """PEFT's model over a variant of `tests.models.checkpoints`; factors of LoRAs are random.

    `base` are changes of the variant's config.
    """
    return adapted(make_model(variant, **base), seed, **config)


def adapted(model: Any, seed: int = 1, **config: Any) -> Any:
    """PEFT's model over one of transformers; factors of LoRAs are random."""
    import peft  # three seconds, which processes that make no adapter do not need

    fields: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL} | config
    type(model).is_gradient_checkpointing = False  # PEFT asks for it, and transformers' warns
    model = peft.get_peft_model(model, peft.LoraConfig(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def make_lora(directory: Path, variant: str = "llama", seed: int = 1, **config: Any) -> Path:
    """Write an adapter for a variant into `directory` and return it."""
    adapted_model(variant, seed, **config).save_pretrained(directory)
    return directory


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """After the last of these tokens."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
    return found


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> Path:
    """Replace or remove tensors of an adapter; names are written with `__` for `.`."""
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file)
    return directory
