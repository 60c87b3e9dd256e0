"""A model of random weights and draft models for it: one often right, and one never right.

The layers of the model behind the first one change little. So the draft model that consists of its
first layer and its head samples mostly the same tokens, as a good draft model of a family does.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from adapters.models.random_checkpoint import config_of, random_checkpoint

VOCAB, LAYERS = 8192, 12  # 98 M parameters, of which the draft model has a fifth
SMALL = 0.01  # the factor of what the layers behind the first one add to the hidden states
SHARP = 40.0  # of the head, so that distributions are about as sharp as those of text


def write_checkpoints(folder: Path) -> tuple[Path, Path, Path]:
    """The model, its first layer, and a model of that size with other weights."""
    config = config_of("M110") | {"vocab_size": VOCAB}
    weights = _weights(config, LAYERS, seed=1)
    first = {
        name: tensor
        for name, tensor in weights.items()
        if ".layers." not in name or ".layers.0." in name
    }
    return (
        _write(folder / "model", config, LAYERS, weights),
        _write(folder / "first_layer", config, 1, first),
        _write(folder / "other_weights", config, 1, _weights(config, 1, seed=2)),
    )


def _weights(config: dict[str, object], num_layers: int, seed: int) -> dict[str, Tensor]:
    """Normal with the usual standard deviation, but for the factors above."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: int(str(config[name])) for name in ("hidden_size", "intermediate_size")}
    hidden, inner = sizes.values()
    kv = hidden * int(str(config["num_key_value_heads"])) // int(str(config["num_attention_heads"]))
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def normal(*shape: int) -> Tensor:
        return (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    found = {
        "model.embed_tokens.weight": normal(VOCAB, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": SHARP * normal(VOCAB, hidden),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            is_small = layer > 0 and name.endswith(("o_proj", "down_proj"))
            found[f"{prefix}{name}.weight"] = normal(*shape) * (SMALL if is_small else 1.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return found


def _write(
    directory: Path, config: dict[str, object], num_layers: int, weights: dict[str, Tensor]
) -> Path:
    shape = directory.with_name(directory.name + "_shape")
    shape.mkdir()
    own = config | {"num_hidden_layers": num_layers}
    (shape / "config.json").write_text(json.dumps(own))
    shutil.copytree(random_checkpoint(str(shape)), directory)  # for its tokenizer
    (directory / "config.json").write_text(json.dumps(own))
    save_file(weights, directory / "model.safetensors")
    return directory
