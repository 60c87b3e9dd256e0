"""Trains a small model of Qwen 3.5's architecture with its layer for multi-token prediction.

    python -m examples.benchmarks.mtp.train --out /tmp/hybrid [--minutes 6]

Checkpoints with a trained layer are large, so this one is made from the built-in model, with its
tokenizer, texts and training: its layers become layers of gated attention, and recurrent layers are
put between them, which at first add nothing. The norms of q and k, which a Llama does not have,
make it another model, which has to be trained again. The layer for multi-token prediction learns
the token after the next (DeepSeek-V3, arXiv:2412.19437, section 2.2, one depth).
"""

import argparse
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

import adapters
from examples.builtin_model.training.batches import Plan, batches
from examples.builtin_model.training.checkpoint import Trained
from examples.builtin_model.training.llama import LanguageModel
from examples.builtin_model.training.training import Course, train

BUILTIN = Path(adapters.__file__).parent / "builtin"
MTP_SHARE = 0.5  # of the layer's loss
LONGEST = 512  # tokens of one example
LAYERS = (0, None, 1, 2, None, 3)  # those of the built-in model, and recurrent ones
HEAD_DIM = 32
EPS = 1e-5
log = logging.getLogger("train")


def config_of(tokenizer: Tokenizer) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=len(LAYERS),
        layer_types=["linear_attention" if each is None else "full_attention" for each in LAYERS],
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        rms_norm_eps=EPS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )


def gated(weights: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """A layer of the built-in model as one of gated attention: all gates are a half, and the norms
    of q and k leave their size about as it is."""
    at = f"model.layers.{number}."
    own = {name[len(at) :]: one.float() for name, one in weights.items() if name.startswith(at)}
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        own[name] -= 1  # norms add one to their weights
    before = 1 + own["input_layernorm.weight"]
    for name in "qk":
        rows = (own[f"self_attn.{name}_proj.weight"] * before).square().sum(dim=1)
        size = rows.view(-1, HEAD_DIM).mean(dim=1).sqrt().mean()
        own[f"self_attn.{name}_norm.weight"] = (size - 1).expand(HEAD_DIM).clone()
    q = own["self_attn.q_proj.weight"].view(-1, HEAD_DIM, before.numel())
    gates = torch.zeros_like(q)  # [heads, dim, hidden]
    own["self_attn.q_proj.weight"] = torch.cat((q, gates), dim=1).flatten(0, 1)
    own["self_attn.o_proj.weight"] *= 2
    return own


class Mtp(nn.Module):
    """The layer; its parameters have the names of a checkpoint."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.num_hidden_layers - 1)])
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.norm = Qwen3_5RMSNorm(hidden, EPS)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, EPS)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, EPS)

    def forward(self, embedded: Tensor, features: Tensor, rope: Any) -> Tensor:
        """[rows, length, hidden] each."""
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features))
        found = self.layers[0](self.fc(torch.cat(both, dim=-1)), position_embeddings=rope)
        return self.norm(found)  # type: ignore[no-any-return]  # a module of transformers


class HybridWithMtp(LanguageModel):
    """The model and its layer."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.trunk: Any = Qwen3_5ForCausalLM(config)
        self.mtp = Mtp(config)

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the layers of the built-in model; the layer for multi-token prediction starts as the
        last one behind the features."""
        self.trunk.model.embed_tokens.weight.data.copy_(weights["model.embed_tokens.weight"])
        for layer, source in zip(self.trunk.model.layers, LAYERS, strict=True):
            if source is None:
                layer.linear_attn.out_proj.weight.data.zero_()
                layer.mlp.down_proj.weight.data.zero_()
            else:
                layer.load_state_dict(gated(weights, source))
        self.trunk.model.norm.weight.data.copy_(weights["model.norm.weight"].float() - 1)
        self.mtp.layers[0].load_state_dict(gated(weights, LAYERS[-1] or 0))
        nn.init.normal_(self.mtp.fc.weight, std=0.02)
        hidden = self.mtp.fc.out_features
        self.mtp.fc.weight.data[:, hidden:] += torch.eye(hidden)

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Cross-entropy of the next tokens, and a share of that of the tokens after the next."""
        inner = self.trunk.model
        features = inner(tokens[:, :-1], use_cache=False).last_hidden_state
        embedded = inner.embed_tokens(tokens[:, 1:-1])
        positions = torch.arange(embedded.shape[1])[None]
        ahead = self.mtp(embedded, features[:, :-1], inner.rotary_emb(embedded, positions))
        following = self._entropy(ahead, tokens[:, 2:], weights[:, 2:])
        return self._entropy(features, tokens[:, 1:], weights[:, 1:]) + MTP_SHARE * following

    def _entropy(self, features: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        is_taught = weights > 0
        logits = F.linear(features[is_taught], self.trunk.model.embed_tokens.weight)
        return F.cross_entropy(logits, targets[is_taught])


def write(folder: Path, config: Qwen3_5TextConfig, weights: dict[str, Tensor]) -> None:
    """A checkpoint directory with the tokenizer and the chat template of the built-in model."""
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(BUILTIN / name, folder / name)
    named = {name.removeprefix("trunk."): tensor for name, tensor in weights.items()}
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in named.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=0, help="train by steps, not by minutes")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    config = config_of(tokenizer)
    model = HybridWithMtp(config)
    model.start_from(load_file(BUILTIN / "model.safetensors"))
    log.info("%d parameters", sum(weight.numel() for weight in model.parameters()))

    def save(weights: dict[str, Tensor], now: Trained) -> None:
        write(options.out, config, weights)
        log.info("saved %s: %s", options.out, now)

    course = Course(
        options.steps, options.minutes, peak_lr=options.lr, warm_up_steps=20, early_share=0.0
    )
    plans = (Plan(seed, seed == 1, options.batch_tokens, LONGEST) for seed in (1, 2))
    early, later = (batches(tokenizer, plan) for plan in plans)
    train(model, (early, later), course, save)


if __name__ == "__main__":
    main()
