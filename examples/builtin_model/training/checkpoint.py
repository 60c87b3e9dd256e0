"""Writes a Hugging Face checkpoint directory; each file is replaced atomically."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from examples.builtin_model.training.bpe import END_OF_TEXT, IM_END, tokenizer_config
from examples.builtin_model.training.chat_template import CHAT_TEMPLATE
from examples.builtin_model.training.llama import Shape

MAX_POSITIONS = 32768


class Trained(NamedTuple):
    """The state of a training, saved in the metadata of the weights, so that it can be resumed."""

    steps: int
    tokens: int
    minutes: float

    def plus(self, more: "Trained") -> "Trained":
        return Trained(
            self.steps + more.steps, self.tokens + more.tokens, self.minutes + more.minutes
        )


def config(shape: Shape, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(IM_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    return {"eos_token_id": ends, "pad_token_id": ends[1]}


def write_checkpoint(
    folder: Path,
    shape: Shape,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    trained: Trained,
    card: str,
) -> None:
    """Write each file under a temporary name, then rename it."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "config.json": json.dumps(config(shape, tokenizer), indent=2) + "\n",
        "generation_config.json": json.dumps(generation_config(tokenizer), indent=2) + "\n",
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": tokenizer_config(CHAT_TEMPLATE) + "\n",
        "README.md": card,
    }
    for name, text in texts.items():
        (folder / f".{name}.new").write_text(text, encoding="utf-8")
    rounded = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    metadata = {"format": "pt", "trained": json.dumps(trained)}
    save_file(rounded, folder / ".model.safetensors.new", metadata=metadata)
    (folder / ".model.safetensors.new").chmod(0o644)
    for name in (*texts, "model.safetensors"):
        os.replace(folder / f".{name}.new", folder / name)


def resume(folder: Path, model: nn.Module) -> Trained:
    """Load the weights; the optimisers' states are not saved."""
    path = folder / "model.safetensors"
    model.load_state_dict({name: weight.float() for name, weight in load_file(path).items()})
    with safe_open(path, framework="pt") as file:
        return Trained(*json.loads((file.metadata() or {}).get("trained", "[0, 0, 0]")))
