"""Tiny random encoders in Hugging Face's format, and sentence-transformers' description of them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# Name of a variant: (transformers' class without "Model" and "Config", what it changes).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert_gelu_tanh": ("Bert", {"hidden_act": "gelu_new"}),
    "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm_roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": ("ModernBert", {"local_attention": 8, "global_attn_every_n_layers": 3}),
    "modernbert_all_global": ("ModernBert", {"global_attn_every_n_layers": 1}),
}


def make_encoder(variant: str, head: str = "Model", **changes: Any) -> Any:
    """A transformers encoder of a variant, every parameter random (norms and biases too)."""
    name, differences = VARIANTS[variant]
    config = getattr(transformers, f"{name}Config")(**(SMALL | differences | changes))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}{head}")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.dim() == 1 and parameter_name.endswith("weight")
            parameter.copy_(1 + 0.1 * noise if is_scale else 0.2 * noise)
    return model


def describe_pooling(directory: Path, mode: str, *, normalizes: bool = True) -> None:
    """Write `modules.json` and `1_Pooling/config.json`, as sentence-transformers 2 to 4 did."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": at, "path": paths[name], "type": f"sentence_transformers.models.{name}"}
        for at, name in enumerate(names)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    keys = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    flags = {f"pooling_mode_{key}": key == mode for key in keys}
    config = {"word_embedding_dimension": 32, **flags}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
