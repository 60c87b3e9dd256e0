"""Tiny Qwen 3.5 checkpoints with a layer for multi-token prediction."""

import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models import qwen3_5  # the slow import of its layers waits for their use

from tests.models.checkpoints import make_checkpoint, make_model

VARIANT = "qwen3_5"
FULL_LAYER = 2  # of the variant: one with attention


def mtp_layer(seed: int = 7) -> tuple[Any, dict[str, Tensor]]:
    """A layer of `transformers` with random weights, and the tensors around it."""
    config = make_model(VARIANT).config
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return 0.2 * torch.randn(size, generator=generator)

    layer = qwen3_5.modeling_qwen3_5.Qwen3_5DecoderLayer(config, FULL_LAYER).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(noise(*parameter.shape))
    hidden = config.hidden_size
    names = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    around = {f"mtp.{name}.weight": noise(hidden) for name in names}
    return layer, around | {"mtp.fc.weight": noise(hidden, 2 * hidden)}


def make_mtp_checkpoint(folder: Path, **changes: Any) -> Path:
    """A checkpoint whose layer has random weights; `changes` as of `make_checkpoint`."""
    directory = make_checkpoint(folder, VARIANT, **changes)
    layer, tensors = mtp_layer()
    for name, tensor in layer.state_dict().items():
        tensors[f"mtp.layers.0.{name}"] = tensor
    path = directory / "model.safetensors"
    save_file(load_file(path) | tensors, path)
    return directory


def make_exact_mtp_checkpoint(folder: Path, **changes: Any) -> Path:
    """A checkpoint whose next token depends on the last one only, and whose layer computes the same
    function: so every proposal is right."""
    directory = make_mtp_checkpoint(folder, **changes)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    hidden = len(tensors["mtp.norm.weight"])
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path)
    return directory


def make_chat_mtp_checkpoint(folder: Path) -> Path:
    """The checkpoint with right proposals, with the tokenizer and chat template of the built-in
    model."""
    directory = make_exact_mtp_checkpoint(folder, vocab_size=2048, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(str(files("adapters") / "builtin" / name), directory / name)
    return directory
