"""Random LoRA adapters, for the built-in model and others, written without PEFT."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, KV, LAYERS, RANK = 192, 512, 64, 4, 8
SIZES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def builtin_lora(directory: Path, seed: int) -> Path:
    """An adapter that changes most of the model's answers; writes over an older one."""
    return random_lora(directory, seed, SIZES, LAYERS)


def random_lora(
    directory: Path, seed: int, sizes: Mapping[str, tuple[int, int]], num_layers: int
) -> Path:
    """An adapter of modules with these outputs and inputs, in each layer of a Llama."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        for module, (outputs, inputs) in sizes.items():
            for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight"
                tensors[name] = 0.05 * torch.randn(shape, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    config |= {"target_modules": [module.partition(".")[2] for module in sizes]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
